"""One training step and one evaluation on Megatron Core's pipeline schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_wd.backend import cpu
from megatron_wd.backend.world import World
from megatron_wd.config import Config
from megatron_wd.models.names import named_parameters
from megatron_wd.optim.build import RatedOptimizer
from megatron_wd.optim.measure import StepMeasures, StepMeter
from megatron_wd.train.batches import Batch


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; every rank raises it at the same step."""


def prepare_schedules(model: list[nn.Module], optimizer: MegatronOptimizer) -> None:
    """Tells Megatron's schedules how gradients are finished and, on GPUs, overlapped.

    Without `finalize_model_grads` the gradients of replicated parameters (norms under sequence
    parallelism, tied embeddings) are not summed and the replicas drift apart.
    """
    config: Any = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:  # type: ignore[union-attr]
        no_sync = [chunk.no_sync for chunk in model]
        sync = [chunk.start_grad_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        config.grad_sync_func = sync if len(model) > 1 else sync[0]


def forward_backward(
    model: list[nn.Module], optimizer: MegatronOptimizer, batches: list[Batch], config: Config
) -> Tensor | None:
    """Runs all micro-batches of a step; gradients are left in the model's buffers.

    Returns:
        This rank's mean loss in nats per token and, where there is one, mean z-loss (float64, 1 or 2
        values) where it is the last pipeline stage and the first tensor-parallel rank, None elsewhere.
    """
    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    # Without the distributed optimizer `param.grad` is the buffer itself after an update; left there,
    # the next backward pass would add the buffer to itself.
    optimizer.zero_grad()
    results = _run_schedule(model, batches, config, forward_only=False)
    if not results or parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    return torch.stack([result["parts"] for result in results]).mean(dim=0)


@torch.no_grad()
def evaluate(model: list[nn.Module], batches: list[Batch], config: Config, world: World) -> float:
    """Mean loss over the weighted samples of all ranks, in nats per token.

    Every token counts once, whatever the layout. The same on every rank.
    """
    for chunk in model:
        chunk.eval()
    results = _run_schedule(model, batches, config, forward_only=True)
    for chunk in model:
        chunk.train()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    if results and parallel_state.get_tensor_model_parallel_rank() == 0:
        totals[0] = sum(result["weighted_loss"] for result in results)
        totals[1] = sum(result["weight"] for result in results)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


@dataclass(frozen=True)
class StepLoss:
    """Means over all tokens of a step, over all ranks.

    Attributes:
        loss: cross entropy in nats per token.
        z_loss: what `train.z_loss` adds to it in what is minimised; None where there is none.
    """

    loss: float
    z_loss: float | None


def agree(local: Tensor | None, stop_requested: bool, world: World) -> tuple[StepLoss, bool]:
    """One small reduction per step: the loss, whether it is finite, whether anybody wants to stop.

    Args:
        local: what `forward_backward` returned on this rank.
        stop_requested: whether this rank got a signal.
        world: this rank's place.

    Returns:
        (means over data-parallel ranks, whether any rank wants to stop), equal on every rank.

    Raises:
        NonFiniteError: on every rank, where the loss of any is NaN or infinite.
    """
    # loss, z-loss, how many ranks gave a z-loss, how many gave a loss, how many want to stop
    sums = torch.zeros(5, dtype=torch.float64, device=world.device)
    if local is not None:
        sums[: len(local)] = local
        sums[2], sums[3] = len(local) - 1, 1.0
    sums[4] = float(stop_requested)
    dist.all_reduce(sums)
    loss, z_loss, with_z_loss, contributors, stops = sums.tolist()
    mean = (loss + z_loss) / contributors
    if not math.isfinite(mean):
        parts = [] if local is None else zip(("loss", "z-loss"), local.tolist(), strict=False)
        wrong = [f"{name} {value}" for name, value in parts if not math.isfinite(value)]
        raise NonFiniteError(_where(" and ".join(wrong) or None, world))
    return StepLoss(loss / contributors, z_loss / contributors if with_z_loss else None), stops > 0


def update(
    model: list[nn.Module],
    optimizer: RatedOptimizer,
    config: Config,
    world: World,
    meter: StepMeter | None = None,
) -> tuple[float, StepMeasures | None]:
    """Clips the gradient and updates the weights, with the rates that were set.

    Args:
        model: this rank's chunks.
        optimizer: updates them.
        config: the run.
        world: this rank's place.
        meter: measures what the step does to every matrix, where given.

    Returns:
        The global L2 norm of the gradient before clipping, and the measures.

    Raises:
        NonFiniteError: on every rank and before any weight changes, where the norm is not finite.
    """
    megatron = optimizer.megatron
    with cpu.cuda_requests_on_cpu():
        megatron.prepare_grads()
        norm = float(megatron.get_grad_norm())
        if not math.isfinite(norm):
            bad = [
                name
                for name, param in named_parameters(model)
                if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
            ]
            raise NonFiniteError(_where(f"gradient of {bad[0]}" if bad else None, world))
        if meter is not None:
            meter.before()
        if config.optim.clip_grad_norm > 0.0:
            params: list[Any] = megatron.get_parameters()
            clip_grad_by_total_norm_fp32(params, config.optim.clip_grad_norm, norm)
        megatron.step_with_ready_grads()
    return norm, None if meter is None else meter.after(optimizer.rates_of)


def _where(mine: str | None, world: World) -> str:
    """Gathers what is not finite on which rank. Collective, on the way down only."""
    found: list[str | None] = [None] * world.size
    dist.all_gather_object(found, f"{mine} on {world.place}" if mine else None)
    return "; ".join(what for what in found if what) or "the global gradient norm"


def _run_schedule(
    model: list[nn.Module], batches: list[Batch], config: Config, *, forward_only: bool
) -> list[dict[str, Tensor]]:
    """Passes all micro-batches through Megatron's pipeline schedule.

    Returns:
        What `_reduce_loss` reports for each micro-batch; empty but on the last pipeline stage.
    """
    interleaved = (
        len(model) > 1
    )  # every chunk then passes through all batches with an iterator of its own
    with cpu.cuda_requests_on_cpu():
        return get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in model] if interleaved else iter(batches),
            model=model if interleaved else model[0],
            num_microbatches=len(batches),
            seq_length=config.train.sequence_tokens,
            micro_batch_size=config.train.micro_batch_samples,
            forward_only=forward_only,
        )


def _forward(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    parts = model(
        input_ids=batch["tokens"],
        position_ids=batch["positions"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return parts, partial(_reduce_loss, weights=batch.get("weights"))


def _reduce_loss(parts: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """parts [cross entropy, z-loss if any; b, s] -> (sum for the gradient, number of tokens, what is
    reported)."""
    total, losses = parts.sum(), parts[0]
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    if weights is None:
        return total, tokens, {"parts": parts.detach().double().mean(dim=(1, 2))}
    report = {
        "weighted_loss": (losses.detach().double().sum(dim=1) * weights).sum(),
        "weight": weights.double().sum() * losses.shape[1],
    }
    return total, tokens, report
