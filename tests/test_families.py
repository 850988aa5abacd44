"""Every family on every layout: the same gradients, the same training, replicas that stay equal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import metrics, run_config, run_ranks
from test_layouts import LAYOUTS, assert_close

FAMILIES = {
    "llama2": [],
    "olmo2": [
        "model.family=olmo2",
        "model.norm_eps=1e-6",
        "model.rope_theta=500000.0",
        "model.init=truncated_normal",
        "train.z_loss=1e-3",
    ],
    "gpt2": [
        "model.family=gpt2",
        "model.num_query_groups=null",
        "model.max_positions=48",
        "model.tie_embeddings=true",
        "model.init=normal",
    ],
}
SHORT = ["train.steps=8", "evaluate.every_steps=8"]


def gradients(path: str, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's gradients of the first step, whole tensors by global name, from norms and biases
    that hide no mistake; and every replicated parameter's bytes after some steps of training."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_wd.backend.world import seed_step, start_world
    from megatron_wd.config import load_config
    from megatron_wd.data.dataset import SampleStream
    from megatron_wd.models.build import build_model, distribute_model
    from megatron_wd.models.init import full_tensor, tensor_parallel_part
    from megatron_wd.models.names import named_parameters
    from megatron_wd.optim.build import build_optimizer
    from megatron_wd.optim.matrices import gather_shapes
    from megatron_wd.optim.rules import resolve_rules
    from megatron_wd.train.batches import train_batches
    from megatron_wd.train.step import forward_backward, prepare_schedules, update

    config = load_config(path, overrides)
    world = start_world(config.parallel)
    chunks = build_model(config)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), config.parallel.tensor
    with torch.no_grad():
        for name, param in named_parameters(chunks):
            if param.dim() == 1:
                shared = not getattr(param, "tensor_model_parallel", False)
                shape = (param.numel() * (1 if shared else size),)
                whole = 0.3 * full_tensor(name, shape, 7, 1.0)
                param += whole if shared else tensor_parallel_part(whole, param, rank, size)
    model = distribute_model(chunks, config)
    optimizer = build_optimizer(model, config, resolve_rules(gather_shapes(model), config))
    prepare_schedules(model, optimizer.megatron)
    stream = SampleStream(config.data.train, config.train.sequence_tokens, config.seed)

    def backward(step: int) -> None:
        seed_step(config.seed, step + 1)
        batches = list(train_batches(stream, world, 8 * step, 8, 4))
        forward_backward(model, optimizer.megatron, batches, config)

    backward(0)
    whole_gradients = {}
    for name, param in named_parameters(model):
        grad = param.main_grad.clone()
        if getattr(param, "tensor_model_parallel", False) and size > 1:
            parts = [torch.empty_like(grad) for _ in range(size)]
            dist.all_gather(parts, grad, group=parallel_state.get_tensor_model_parallel_group())
            stride = param.partition_stride
            pieces = [part.chunk(stride, param.partition_dim) for part in parts]
            grad = torch.cat([p[i] for i in range(stride) for p in pieces], param.partition_dim)
        whole_gradients[name] = grad.numpy()
    for step in range(config.steps):
        if step > 0:
            backward(step)
        optimizer.set_rates(step + 1)
        update(model, optimizer, config, world)
    replicated = {
        name: param.detach().numpy().tobytes()
        for name, param in named_parameters(model)
        if not getattr(param, "tensor_model_parallel", False)
    }
    return whole_gradients, replicated


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_gradients_are_those_of_one_rank(family: str, tiny: Path) -> None:
    options = [*FAMILIES[family], "train.steps=20", f"run_dir={tiny.parent}/gradients"]
    ((wanted, _),) = run_ranks(1, gradients, str(tiny), options)
    assert all(np.abs(grad).max() > 1e-6 for grad in wanted.values()), "a gradient is zero"
    for layout in ("tp2", "tp2+sp"):
        ranks, overrides = LAYOUTS[layout]
        (first, same), (second, other) = run_ranks(
            ranks, gradients, str(tiny), [*options, *overrides]
        )
        for name, grad in wanted.items():
            for found in (first[name], second[name]):
                difference = np.abs(found - grad).max()
                assert difference <= 1e-5 * max(1.0, np.abs(grad).max()), (layout, name, difference)
        assert same and same == other, f"replicas differ after 20 steps on {layout}"


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_losses_agree_on_every_layout(family: str, tiny: Path) -> None:
    options = [*FAMILIES[family], *SHORT]
    reference = tiny.parent / f"{family} reference"
    assert run_config(1, tiny, f"run_dir={reference}", *options) == [0]
    for layout in ("tp2+sp", "pp2 interleaved", "dp2 distributed optimizer", "tp2 pp2"):
        ranks, overrides = LAYOUTS[layout]
        run_dir = tiny.parent / f"{family} {layout}"
        recompute = (
            "train.recompute=full" if layout == "pp2 interleaved" else "train.recompute=none"
        )
        arguments = [f"run_dir={run_dir}", *options, *overrides, recompute]
        assert run_config(ranks, tiny, *arguments) == [0] * ranks
        assert_close(run_dir, reference, 1e-5)
    rows = metrics(reference)
    assert ("loss/z" in rows[1]) == (family == "olmo2")
    assert rows[8]["loss/train"] < rows[1]["loss/train"]
