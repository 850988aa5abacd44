"""Which samples this rank reads at a step, as tensors.

A step's samples are global numbers; every data-parallel rank takes its share of each micro-batch, so the
step sees the same samples on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_wd.backend.world import World
from megatron_wd.data.dataset import SampleStream

Batch = dict[str, Tensor]


def train_batches(
    stream: SampleStream, world: World, first_sample: int, global_batch: int, micro_batch: int
) -> Iterator[Batch]:
    """Yields this rank's micro-batches of the step that begins at `first_sample`.

    Args:
        stream: where samples come from.
        world: this rank's place.
        first_sample: number of samples consumed before the step.
        global_batch: samples per step over all ranks.
        micro_batch: samples per forward pass.
    """
    stride = micro_batch * world.data_size
    for start in range(0, global_batch, stride):
        begin = first_sample + start + world.data_rank * micro_batch
        yield _batch(stream, range(begin, begin + micro_batch), world)


def evaluation_batches(
    stream: SampleStream, world: World, samples: int, micro_batch: int, multiple: int
) -> Iterator[Batch]:
    """Yields this rank's micro-batches of samples 0 to `samples`-1, each sample on one rank.

    The last ones are filled up with sample 0 at weight 0 so that every rank runs the same number of
    micro-batches, a multiple of `multiple` (interleaved pipelines want the pipeline size).
    """
    stride = micro_batch * world.data_size
    count = -(-samples // stride)
    count = -(-count // multiple) * multiple
    for index in range(count):
        begin = index * stride + world.data_rank * micro_batch
        numbers = np.arange(begin, begin + micro_batch)
        real = numbers < samples
        batch = _batch(stream, np.where(real, numbers, 0), world)
        batch["weights"] = torch.from_numpy(real).to(world.device, torch.float32)
        yield batch


def _batch(stream: SampleStream, numbers: range | np.ndarray, world: World) -> Batch:
    """tokens, labels one token ahead, and positions in the sequence: int64 [b, s]."""
    windows = torch.from_numpy(np.stack([stream[int(number)] for number in numbers]))
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = {"tokens": tokens, "labels": labels, "positions": positions}
    if world.context_size > 1:
        batch = {
            k: context_part(v, world.context_rank, world.context_size) for k, v in batch.items()
        }
    if world.device.type == "cuda":
        batch = {k: v.pin_memory().to(world.device, non_blocking=True) for k, v in batch.items()}
    return batch


def context_part(x: Tensor, rank: int, size: int) -> Tensor:
    """A context-parallel rank's part of [b, s]: a piece from the front and its mirror from the back.

    Causal attention costs more the later a token stands; pairs of 2 * size pieces cost all ranks the same.
    Megatron Core's rotary embedding and attention expect this division.
    """
    pieces = x.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim=1)
