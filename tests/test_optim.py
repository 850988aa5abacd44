"""Schedules as numbers, and decay measured on every tensor after one real step."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megatron_wd.config import Config, load_config
from megatron_wd.optim.schedule import learning_rate


def schedule(tiny: Path, *overrides: str) -> list[float]:
    config = load_config(tiny, ["optim.lr=1.0", *overrides])
    return [learning_rate(step, config) for step in range(1, config.steps + 1)]


def test_cosine_warms_up_peaks_and_ends_at_a_tenth(tiny: Path) -> None:
    rates = schedule(tiny, "train.steps=25")
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[4:]))


def test_wsd_is_stable_then_linear(tiny: Path) -> None:
    rates = schedule(tiny, "train.steps=20", "optim.schedule=wsd", "optim.min_lr=0.0")
    assert rates[4:16] == [1.0] * 12
    assert rates[16:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_constant_stays(tiny: Path) -> None:
    assert schedule(tiny, "optim.schedule=constant")[5:] == [1.0] * 15


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("decay", ["all", "skip_1d", "skip_embeddings"])
def test_one_step_without_gradient_decays_exactly_what_the_table_says(
    decay: str, precision: str, tiny: Path
) -> None:
    options = [f"optim.decay={decay}", f"precision={precision}", "optim.weight_decay=0.5"]
    for rank in run_ranks(2, _step_without_gradient, str(tiny), [*options, "parallel.tensor=2"]):
        assert len(rank) == 4 * 6 + 3
        for name, (before, after, listed) in rank.items():
            exempt = {
                "all": False,
                "skip_1d": "norm" in name,
                "skip_embeddings": name == "embedding.word_embeddings.weight",
            }[decay]
            assert listed == (0.0 if exempt else 0.5), name
            expected = before if exempt else before * (1.0 - 0.003 * 0.5)
            assert torch.equal(after, expected), name


def _step_without_gradient(config_path: str, overrides: list[str]) -> dict:
    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import start_world
    from megatron_wd.models.build import build_model, distribute_model
    from megatron_wd.models.names import named_parameters
    from megatron_wd.optim.build import build_optimizer, set_rates
    from megatron_wd.optim.decay import decay_table

    config: Config = load_config(config_path, overrides)
    start_world(config.parallel)
    model = distribute_model(build_model(config), config)
    optimizer = build_optimizer(model, config)
    table = {row.name: row.weight_decay for row in decay_table(model, config)}

    def masters() -> dict[str, torch.Tensor]:
        """fp32 weights that the optimizer updates (with one data-parallel rank, all of them)."""
        return {
            name: getattr(p, "main_param", p).detach().clone().flatten()
            for name, p in named_parameters(model)
        }

    before = masters()
    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    with cpu.cuda_requests_on_cpu():
        optimizer.prepare_grads()
        set_rates(optimizer, 0.003, config.optim.weight_decay)
        optimizer.step_with_ready_grads()
    after = masters()
    return {name: (before[name], after[name], table[name]) for name in before}
