"""The run folder, what is checked before training, and the summary that is printed."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

import megatron_wd
from megatron_wd.backend.world import World
from megatron_wd.config import Config, UserError, num_parameters
from megatron_wd.optim.decay import DecayRow
from megatron_wd.train.checkpoint import checkpoint_bytes

# May differ when a run is resumed: they change where and how the run computes, not what.
_FREE_ON_RESUME = {"run_dir", "checkpoint", "evaluate", "log", "parallel"}
_FREE_FIELDS = {("train", "micro_batch_samples"), ("train", "recompute")}
_FIXED_FIELDS = {("parallel", "distributed_optimizer")}


def prepare_run_dir(config: Config, resolved: str) -> IO[str]:
    """Creates the run folder and writes config.yaml, or checks that the folder is this run's.

    Returns:
        An open file that locks the folder; as long as it is open, no second run can use the folder.

    Raises:
        UserError: the folder cannot be written, is in use, or belongs to a run of another config.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"run_dir {run_dir} is in use by another run that has not ended. Stop that one, or choose "
            "another run_dir."
        ) from error
    except (OSError, ValueError) as error:  # a ValueError for characters that no path can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"run_dir {run_dir} cannot be written: {reason}. Choose another run_dir."
        ) from error
    saved = run_dir / "config.yaml"
    if saved.is_file():
        changes = changed_fields(saved, config)
        if changes and not config.checkpoint.accept_config_change:
            listed = "\n  ".join(changes)
            raise UserError(
                f"run_dir {run_dir} holds a run of another config:\n  {listed}\nChoose another run_dir, "
                "or set checkpoint.accept_config_change=true to go on with the new values."
            )
        if changes:
            print("config changed on resume:\n  " + "\n  ".join(changes), flush=True)
    temporary = saved.with_suffix(".tmp")
    temporary.write_text(resolved)
    os.replace(temporary, saved)
    return lock


def changed_fields(saved: Path, config: Config) -> list[str]:
    """Fields that change what is computed and differ from the saved config: `path: old -> new`."""
    from megatron_wd.config import load_config

    before, now = asdict(load_config(str(saved), [])), asdict(config)
    changes = []
    for path, old, new in _leaves(before, now):
        section, field = path[0], path[1] if len(path) > 1 else ""
        if section in _FREE_ON_RESUME and path[:2] not in _FIXED_FIELDS:
            continue
        if (section, field) in _FREE_FIELDS or old == new:
            continue
        changes.append(f"{'.'.join(path)}: {old} -> {new}")
    return changes


def _leaves(
    before: Any, now: Any, path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            leaf for key in before for leaf in _leaves(before[key], now.get(key), (*path, str(key)))
        ]
    return [(path, before, now)]


def write_provenance(config: Config, world: World) -> None:
    """Writes provenance.json: versions, code version and layout. No environment variables."""
    packages = ("torch", "megatron-core", "numpy", "transformers", "transformer-engine")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    record = {
        "megatron_wd": megatron_wd.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": versions,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": world.size,
        "layout": {**asdict(config.parallel), "data": world.data_size},
    }
    path = Path(config.run_dir) / "provenance.json"
    path.write_text(json.dumps(record, indent=2) + "\n")


def git_commit() -> str | None:
    """Commit of the code that runs, with `+changes` where the tree differs from it; None outside git."""
    root = Path(megatron_wd.__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def memory_bytes_per_rank(config: Config, world: World) -> int:
    """Estimated memory of one rank: weights, gradients, optimizer state and kept activations.

    Weights 4 bytes (bf16: 2), fp32 gradients 4, Adam's means 8 and, for bf16, fp32 masters 4; with the
    distributed optimizer the last two are divided by the data-parallel size. Activations per token and
    layer: about 10 values of hidden size and 3 of MLP width (without recomputation), plus the logits.
    """
    model, parallel = config.model, config.parallel
    half = config.precision != "fp32"
    params = num_parameters(model) / (parallel.tensor * parallel.pipeline)
    state = params * (
        (8 + (4 if half else 0)) / (world.data_size if parallel.distributed_optimizer else 1)
    )
    weights = params * ((2 if half else 4) + 4)
    tokens = config.train.micro_batch_samples * config.train.sequence_tokens
    value = 2 if half else 4
    kept = 1 if config.train.recompute == "full" else 10
    per_layer = kept * model.hidden_size
    if config.train.recompute == "none":
        per_layer += 3 * model.ffn_hidden_size
    activations = tokens * value * per_layer * model.num_layers / parallel.tensor
    logits = tokens * model.padded_vocab_size * (value + 4) / parallel.tensor
    return int(weights + state + activations + logits)


def summary(
    config: Config,
    world: World,
    decay: list[DecayRow],
    tokens_in_data: int,
    peak: tuple[float | None, str],
) -> str:
    """What is about to happen, in less than 40 lines."""
    model, train, parallel, optim = config.model, config.train, config.parallel, config.optim
    total = num_parameters(model)
    inner = num_parameters(model, include_embeddings=False)
    micro_batches = train.global_batch_samples // (train.micro_batch_samples * world.data_size)
    decayed = [row for row in decay if row.weight_decay != 0.0]
    exempt = [row for row in decay if row.weight_decay == 0.0]
    decayed_count = sum(_numel(row.shape) for row in decayed)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"megatron_wd {megatron_wd.__version__}, run {config.run_dir}, seed {config.seed}",
        f"model       {model.family}: {model.num_layers} layers, hidden {model.hidden_size}, MLP "
        f"{model.ffn_hidden_size}, heads {model.num_attention_heads} (KV {model.kv_heads}), vocabulary "
        f"{model.vocab_size} (padded {model.padded_vocab_size})",
        f"parameters  {total:,} ({inner:,} without embeddings)",
        f"layout      {world.size} x {device}: tensor {parallel.tensor}"
        f"{' + sequence' if parallel.sequence else ''}, pipeline {parallel.pipeline}"
        f"{f' x {parallel.virtual_pipeline} chunks' if parallel.virtual_pipeline > 1 else ''}, "
        f"context {parallel.context}, data {world.data_size}"
        f"{' (distributed optimizer)' if parallel.distributed_optimizer else ''}, {config.precision}",
        f"tokens      {config.total_tokens:,} in {config.steps:,} steps "
        f"({config.total_tokens / tokens_in_data:.2f} passes over {tokens_in_data:,} tokens; "
        f"{config.total_tokens / total:.1f} per parameter)",
        f"batch       {train.global_batch_samples} samples x {train.sequence_tokens} tokens = "
        f"{train.step_tokens:,} tokens; micro-batches "
        f"{micro_batches} of {train.micro_batch_samples}",
        f"optimizer   AdamW, lr {optim.lr:g} -> {optim.final_lr:g} ({optim.schedule}, warmup "
        f"{config.warmup_steps} steps), betas {optim.beta1}/{optim.beta2}, clip {optim.clip_grad_norm:g}",
        f"decay       {optim.weight_decay:g} on {len(decayed)} tensors ({decayed_count:,} values); none on "
        f"{len(exempt)} tensors ({optim.decay}); table in weight_decay.tsv",
        f"memory      about {memory_bytes_per_rank(config, world) / 1e9:.2f} GB of tensors per rank, besides "
        f"the libraries; checkpoint "
        f"{checkpoint_bytes(config) / 1e9:.2f} GB",
        "peak        " + (f"{peak[0]:.3g} TFLOP/s per rank ({peak[1]})" if peak[0] else peak[1]),
    ]
    if train.tokens is not None and config.total_tokens != train.tokens:
        lines.append(f"note        train.tokens={train.tokens:,} rounded up to whole steps")
    return "\n".join(lines)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
