"""What a step does to every matrix, against plain computations: measures, AdamH, closed forms."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import metrics, run_config, run_ranks
from test_families import FAMILIES

from megatron_wd.config import load_config
from megatron_wd.optim.schedule import learning_rate

sys.path.insert(0, str(Path(__file__).parent.parent / "tools" / "bench"))
import equilibrium

ADAMH = [
    "optim.optimizer=adamh",
    "optim.matrix_lr=0.02",
    "optim.clip_grad_norm=0",
    "optim.decay=no_embeddings",
]


def train_and_compare(path: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Trains a few steps on one rank; for each what was measured, and the whole tensors around it."""
    import torch

    from megatron_wd.backend.world import seed_step, start_world
    from megatron_wd.optim.matrices import master_weights
    from megatron_wd.train.batches import train_batches
    from megatron_wd.train.setup import set_up
    from megatron_wd.train.step import forward_backward, update

    config = load_config(path, overrides)
    world = start_world(config.parallel)
    run = set_up(config, world)
    masters = list(master_weights(run.model, run.optimizer.megatron))
    shapes = {rule.name: rule.shape for rule in run.optimizer.rules.values()}

    def weights() -> dict[str, np.ndarray]:
        return {
            m.parameter: m.weight.detach().double().view(shapes[m.parameter]).numpy()
            for m in masters
        }

    found = []
    for step in range(1, config.steps + 1):
        seed_step(config.seed, step)
        batches = list(train_batches(run.train_data, world, 8 * step, 8, 4))
        forward_backward(run.model, run.optimizer.megatron, batches, config)
        run.optimizer.set_rates(step)
        before = weights()
        gradients = {
            m.parameter: m.weight.main_grad.double() if hasattr(m.weight, "main_grad") else None
            for m in masters
        }
        _, measures = update(run.model, run.optimizer, config, world, run.meter)
        assert measures is not None
        rows = {
            matrix.name: {name: float(value[i]) for name, value in vars(measures).items()}
            for i, matrix in enumerate(run.optimizer.matrices)
        }
        kept = {name: None if g is None else g.numpy() for name, g in gradients.items()}
        found.append({"before": before, "after": weights(), "gradients": kept, "rows": rows})
    assert torch.get_num_threads() == 1
    return found


def split(tensors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """Whole parameters as the model's matrices, by plain indexing: no code of the product."""
    model, result = config.model, {}
    head, groups = model.head_size, model.kv_heads
    queries = model.num_attention_heads // groups
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
        block = f"layers.{int(layer) // 2}." if layer else ""
        if name.endswith("linear_qkv.weight"):
            rows = tensor.reshape(groups, queries + 2, head, -1)
            result[block + "q"] = rows[:, :queries]
            result[block + "k"], result[block + "v"] = rows[:, queries], rows[:, queries + 1]
        elif name.endswith("linear_fc1.weight") and model.family != "gpt2":
            half = len(tensor) // 2
            result[block + "fc1_gate"], result[block + "fc1_up"] = tensor[:half], tensor[half:]
        elif name.endswith(("linear_fc1.weight", "linear_fc2.weight", "linear_proj.weight")):
            result[block + name.split("_")[-1].removesuffix(".weight")] = tensor
        elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            result["embedding" if name.startswith("embedding") else "head"] = tensor
    return result


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_measures_are_what_their_names_say(family: str, tiny: Path) -> None:
    options = [*FAMILIES[family], "train.steps=3", "optim.warmup_steps=1", "optim.weight_decay=0.5"]
    options += ["log.matrices_every_steps=1"]
    options += [f"run_dir={tiny.parent}/measures {family}"]
    config = load_config(tiny, options)
    ((*_, last),) = run_ranks(1, train_and_compare, str(tiny), options)
    before, after = split(last["before"], config), split(last["after"], config)
    lr = learning_rate(3, config)
    decay = 0.5 * lr
    assert len(before) == 4 * (6 if family == "gpt2" else 7) + (1 if family == "gpt2" else 2)
    for name, w in before.items():
        row, new = last["rows"][name], after[name]
        norm, new_norm = np.linalg.norm(w), np.linalg.norm(new)
        assert row["weight_norm"] == pytest.approx(new_norm, rel=1e-6)
        assert row["update_norm"] == pytest.approx(np.linalg.norm(new - w), rel=1e-5)
        turned = np.linalg.norm(new / new_norm - w / norm)
        assert row["effective_lr"] == pytest.approx(turned, rel=1e-4), name
        descent = np.linalg.norm(new - (1 - decay) * w)
        share = decay * norm / (decay * norm + descent)
        assert row["decay_share"] == pytest.approx(share, rel=1e-4)
        wanted = descent * math.sqrt(19 / (decay * (2 - decay)))  # beta1 is 0.9
        assert row["equilibrium_norm"] == pytest.approx(wanted, rel=1e-4)
        assert row["equilibrium_effective_lr"] == pytest.approx(math.sqrt(2 * decay / 19), rel=1e-9)


@pytest.mark.distributed
def test_adamh_is_its_formula(tiny: Path) -> None:
    options = [*ADAMH, "train.steps=4", "optim.warmup_steps=1", f"run_dir={tiny.parent}/adamh"]
    options += ["parallel.distributed_optimizer=false"]
    config = load_config(tiny, options)
    (steps,) = run_ranks(1, train_and_compare, str(tiny), options)
    first = split(steps[0]["before"], config)
    radii = {name: np.linalg.norm(w) for name, w in first.items()}
    mean = {name: 0.0 for name in first}
    square = {name: 0.0 for name in first}
    for count, step in enumerate(steps, start=1):
        before, after = split(step["before"], config), split(step["after"], config)
        gradients = split(step["gradients"], config)
        lr = 0.02 * learning_rate(count, config) / config.optim.lr
        for name, w in before.items():
            g = gradients[name]
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g**2
            u = mean[name] / (1 - 0.9**count)
            u = u / (np.sqrt(square[name] / (1 - 0.95**count)) + 1e-8)
            if not name.startswith("layers."):
                continue
            moved = w - lr * radii[name] * u / np.linalg.norm(u)
            wanted = radii[name] * moved / np.linalg.norm(moved)
            np.testing.assert_allclose(after[name], wanted, rtol=0, atol=2e-6 * np.abs(w).max())
            assert step["rows"][name]["effective_lr"] == pytest.approx(lr, rel=0.05)


@pytest.mark.distributed
@pytest.mark.slow
def test_adamh_keeps_every_norm_on_a_divided_model(tiny: Path) -> None:
    run_dir = tiny.parent / "adamh divided"
    options = [*ADAMH, "train.steps=200", "model.hidden_size=32", "train.sequence_tokens=16"]
    options += ["parallel.tensor=2", "parallel.pipeline=2", "evaluate.samples=4"]
    options += ["evaluate.every_steps=null", "train.micro_batch_samples=4", "log.every_steps=20"]
    options += ["model.num_layers=2", "train.global_batch_samples=4"]
    options += ["log.matrices_every_steps=20"]
    assert run_config(4, tiny, f"run_dir={run_dir}", *options) == [0] * 4
    config = load_config(tiny, options)
    rows = metrics(run_dir)
    # Within 10 %: a step of length lr turns the matrix less where it is not at a right angle to it.
    kinds = ("q", "k", "v", "proj", "fc1_gate", "fc1_up", "fc2")
    for kind in kinds:
        norms = [rows[step][f"weight_norm/{kind}"] for step in range(20, 201, 20)]
        assert max(norms) == pytest.approx(min(norms), rel=1e-6), kind
        for step in range(20, 201, 20):
            lr = 0.02 * learning_rate(step, config) / config.optim.lr
            assert rows[step][f"effective_lr/{kind}"] == pytest.approx(lr, rel=0.1), (kind, step)
    assert rows[200]["loss/train"] < rows[20]["loss/train"]


@pytest.mark.distributed
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_norm_and_effective_rate_follow_the_closed_forms(beta1: float) -> None:
    early, late = run_ranks(1, follow_rates, beta1)[0]
    for point in early + late:
        assert point.norm == pytest.approx(point.predicted_norm, rel=0.05)
        assert point.effective_lr == pytest.approx(point.predicted_effective_lr, rel=0.06)
    assert equilibrium.slope(early) == pytest.approx(1.0, abs=0.02)
    assert equilibrium.slope(late) == pytest.approx(0.5, abs=0.03)


def follow_rates(beta1: float) -> tuple[list, list]:
    """Points well before and at equilibrium."""
    from megatron_wd.backend.world import single_process

    with single_process():
        early = [equilibrium.follow(lr, 300, beta1) for lr in (1e-5, 1e-4, 4e-4)]
        late = [equilibrium.follow(lr, 1300, beta1) for lr in (0.02, 0.04, 0.08)]
    assert all(point.relaxed < 0.05 for point in early)
    assert all(point.relaxed > 0.99 for point in late)
    return early, late
