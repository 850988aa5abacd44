"""Real gloo ranks for tests: forked from a parent that has imported what they need, so they start at once."""

import json
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(
    count: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list:
    """Runs `function(*args)` on `count` ranks; returns what each returned, in order.

    A rank that raises fails the test with its traceback; a rank that hangs is killed and named.
    """
    _import_for_children()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, count, port, sender, function, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results, failures = [], []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        outcome: tuple[bool, Any] = (False, f"no answer within {timeout_s} s")
        if pipe.poll(timeout_s):
            try:
                outcome = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join(5)
                outcome = (False, f"died with exit code {process.exitcode}")
        if not outcome[0]:
            failures.append(f"rank {rank}: {outcome[1]}")
        results.append(outcome[1])
    for process in processes:
        if failures:
            process.kill()
        process.join(20)
        if process.is_alive():
            process.kill()
    assert not failures, "\n".join(failures)
    return results


def run_config(count: int, config: Path, *overrides: str) -> list[int]:
    """Trains a config on forked ranks, as `launch/pretrain.sh` does; returns the exit codes."""
    return run_ranks(count, train, str(config), list(overrides))


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Rows of metrics.jsonl by step; a step must not stand there twice."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), f"steps do not increase: {steps}"
    return {row["step"]: row for row in rows}


def results_of(run_dir: Path) -> dict[int, tuple]:
    """What must not depend on when and how often a run was stopped."""
    keys = ("loss/train", "loss/valid", "grad_norm", "lr", "tokens")
    return {step: tuple(row.get(key) for key in keys) for step, row in metrics(run_dir).items()}


def train(config: str, overrides: list[str]) -> int:
    from megatron_wd.backend.launch import run_worker
    from megatron_wd.config import load_config
    from megatron_wd.train.main import run

    return run_worker(lambda: run(load_config(config, overrides)))


def _import_for_children() -> None:
    from megatron_wd.backend import cpu

    cpu.install()
    import torch
    import torch.utils.tensorboard

    import megatron_wd.data.tokenizer
    import megatron_wd.models.build
    import megatron_wd.optim.build
    import megatron_wd.train.loop
    import megatron_wd.train.main
    import megatron_wd.train.setup  # noqa: F401

    torch.set_num_threads(1)


def _child(rank: int, count: int, port: int, sender: Any, function: Any, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    # torch makes its thread pool anew at the first use after a fork, and two threads that come
    # first together (transformers loads weights with several) find none.
    torch.set_num_threads(1)
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown of what belongs to the parent
