"""The process group and this rank's place in it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_wd.backend import cpu
from megatron_wd.config import ParallelConfig


@dataclass(frozen=True)
class World:
    """Where this process stands in the layout.

    Attributes:
        rank: this process among all, from 0.
        size: number of processes.
        device: where tensors live.
        tensor_rank, pipeline_rank, data_rank, context_rank: coordinates in the layout.
        data_size: number of data-parallel replicas.
        context_size: number of ranks that share a sequence.
    """

    rank: int
    size: int
    device: torch.device
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes shared files."""
        return self.rank == 0

    @property
    def place(self) -> str:
        """For messages: the rank and its coordinates."""
        return (
            f"rank {self.rank} (tensor {self.tensor_rank}, pipeline {self.pipeline_rank}, "
            f"data {self.data_rank})"
        )


def pick_device() -> torch.device:
    """The CUDA device of this local rank, or the CPU with its stand-in installed."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    cpu.install()
    return torch.device("cpu")


def quiet_libraries() -> None:
    """Drops remarks that Megatron Core and torch make about choices which are ours, and on purpose.

    Ours to know: torch kernels instead of Transformer Engine's and Apex's, torch_dist checkpoints written
    into a folder that already holds the configuration, collectives that torch will rename, no CUDA.
    Call it before Megatron Core is imported.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Reading a checkpoint asks every rank for what it needs by itself; torch remarks on that.
    warnings.filterwarnings(
        "ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint"
    )
    warnings.filterwarnings("ignore", category=SyntaxWarning)


def start_world(parallel: ParallelConfig, *, timeout_s: float = 1800.0) -> World:
    """Joins the process group that torchrun (or a single process) announces and lays it out.

    Args:
        parallel: sizes of the layout.
        timeout_s: after which a collective that some rank never joins is an error.

    Returns:
        This rank's place. The number of processes must fit the layout (`config.validate_world`).
    """
    quiet_libraries()
    device = pick_device()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(_free_port())
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
        )
    return _lay_out(parallel, device)


def _lay_out(parallel: ParallelConfig, device: torch.device, *, gloo: bool = True) -> World:
    """Divides the ranks of the process group; `gloo` says whether checkpoints will need its groups."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        create_gloo_process_groups=gloo,
    )
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
    )


def stop_world() -> None:
    """Leaves the process group; safe to call twice."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def single_process() -> Iterator[World]:
    """A world of one process, for tools that build a model (conversion, checks)."""
    world = start_world(ParallelConfig())
    try:
        yield world
    finally:
        stop_world()


@contextlib.contextmanager
def pretended_world(parallel: ParallelConfig, *, rank: int, size: int) -> Iterator[World]:
    """The place of one rank among many that do not exist; tensors that are made inside hold no values.

    Collectives return at once and move nothing. For building models of any layout in one process, on
    the CPU (`dry_run.py`).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet_libraries()
    assert pick_device().type == "cpu", "hide the GPUs before torch is imported"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with torch.device("meta"):
            yield _lay_out(parallel, torch.device("meta"), gloo=False)
    finally:
        stop_world()


def seed_step(seed: int, step: int) -> None:
    """Sets every random stream (dropout) from the seed and the step alone.

    Nothing random is carried from one step to the next, so a resumed run draws exactly what the
    uninterrupted one would have drawn, over any number of restarts and without saved states.
    The default stream differs between data-parallel replicas, the model-parallel stream besides
    between tensor-parallel ranks.

    Args:
        seed: the run's seed.
        step: number of the step, from 1.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    key = f"{seed}:{step}:{replica}:{stage}".encode()
    # 62 bits: Megatron adds its own small offsets, and a seed must stay below 2**63.
    base = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2
    model_parallel_cuda_manual_seed(base, force_reset_rng=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def memory_bytes(world: World) -> int:
    """The largest memory that any rank has used so far: CUDA allocations, or resident size on the CPU.

    Collective: every rank must call it.
    """
    if world.device.type == "cuda":
        used = torch.cuda.max_memory_allocated()
    else:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    largest = torch.tensor(used, dtype=torch.int64, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def run_on_main(world: World, action: Callable[[], None]) -> None:
    """Runs something on the main rank alone; an error there is raised on every rank, so none waits.

    Collective: every rank must call it.

    Raises:
        Exception: whatever `action` raised on the main rank.
    """
    outcome: list[Exception | None] = [None]
    if world.is_main:
        try:
            action()
        except Exception as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
