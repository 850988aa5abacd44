"""The run folder, what is checked before training, and the summary that is printed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

import megatron_wd
from megatron_wd.backend.world import World
from megatron_wd.config import Config, UserError, num_parameters
from megatron_wd.optim.rules import ParameterRule
from megatron_wd.train.checkpoint import checkpoint_bytes
from megatron_wd.train.memory import pipeline_memory

# May differ when a run is resumed: they change where and how the run computes, not what.
_FREE_ON_RESUME = {"run_dir", "checkpoint", "evaluate", "log", "parallel"}
_FREE_FIELDS = {("train", "micro_batch_samples"), ("train", "recompute")}
# May be changed on purpose when a run is resumed: printed, and recorded in config_changes.jsonl.
_RATES = {
    ("optim", name)
    for name in (
        *("lr", "min_lr", "matrix_lr", "schedule", "warmup_steps", "warmup_fraction"),
        *("wsd_decay_fraction", "weight_decay", "decay", "decay_rules", "decay_mode"),
        *("decay_schedule", "clip_grad_norm"),
    )
}
_FIXED_FIELDS = {("parallel", "distributed_optimizer")}


def prepare_run_dir(config: Config, resolved: str, changes: list[str]) -> IO[str]:
    """Creates the run folder and writes config.yaml, or checks that the folder is this run's.

    Args:
        config: the run.
        resolved: what to write.
        changes: gets what differs from the config that is there, and was accepted.

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
        found = changed_fields(saved, config)
        refused = [text for path, text in found if path not in _RATES]
        if refused and not config.checkpoint.accept_config_change:
            listed = "\n  ".join(refused)
            raise UserError(
                f"run_dir {run_dir} holds a run of another config:\n  {listed}\nChoose another run_dir, "
                "or set checkpoint.accept_config_change=true to go on with the new values."
            )
        changes.extend(text for _, text in found)
        if changes:
            print("config changed on resume:\n  " + "\n  ".join(changes), flush=True)
    temporary = saved.with_suffix(".tmp")
    temporary.write_text(resolved)
    os.replace(temporary, saved)
    return lock


def changed_fields(saved: Path, config: Config) -> list[tuple[tuple[str, str], str]]:
    """Fields that change what is computed and differ from the saved config.

    Returns:
        Section and field, and `path: old -> new`, of each.
    """
    from megatron_wd.config import load_config

    before, now = asdict(load_config(str(saved), [])), asdict(config)
    changes = []
    for path, old, new in _leaves(before, now):
        section, field = path[0], path[1] if len(path) > 1 else ""
        if section in _FREE_ON_RESUME and path[:2] not in _FIXED_FIELDS:
            continue
        if (section, field) in _FREE_FIELDS or old == new:
            continue
        changes.append(((section, field), f"{'.'.join(path)}: {old} -> {new}"))
    return changes


def record_changes(run_dir: Path, step: int, changes: list[str]) -> None:
    """Adds what a resumed run does otherwise from a step on to config_changes.jsonl."""
    if changes:
        record = {"after_step": step, "time_s": round(time.time(), 3), "changes": changes}
        with (run_dir / "config_changes.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


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


def summary(
    config: Config,
    ranks: int,
    who: str,
    rules: Mapping[str, ParameterRule],
    tokens_in_data: int | None,
    peak: tuple[float | None, str] | None,
) -> str:
    """What is about to happen, in less than 40 lines.

    Args:
        config: validated, also for `ranks`.
        ranks: processes over all nodes.
        who: how many of what, as in `8 x CPU`.
        rules: what was decided for each parameter of the whole model.
        tokens_in_data: of the training corpora; None where they were not opened.
        peak: from `peak_tflops`; None where nothing will be computed.
    """
    data_size = ranks // config.parallel.model_ranks
    lines = [
        f"megatron_wd {megatron_wd.__version__}, run {config.run_dir}, seed {config.seed}",
        *_model_lines(config),
        _layout_line(config, who, data_size),
        *_batch_lines(config, data_size, tokens_in_data),
        *_optimizer_lines(config, rules),
        _memory_line(config, ranks),
    ]
    if peak is not None:
        rate = f"{peak[0]:.3g} TFLOP/s per rank ({peak[1]})" if peak[0] else peak[1]
        lines.append(f"peak        {rate}")
    if config.train.tokens is not None and config.total_tokens != config.train.tokens:
        lines.append(f"note        train.tokens={config.train.tokens:,} rounded up to whole steps")
    return "\n".join(lines)


def _model_lines(config: Config) -> list[str]:
    model = config.model
    inner = num_parameters(model, include_embeddings=False)
    lines = [
        f"model       {model.family}: {model.num_layers} layers, hidden {model.hidden_size}, MLP "
        f"{model.ffn_hidden_size}, heads {model.num_attention_heads} (KV {model.kv_heads}), vocabulary "
        f"{model.vocab_size} (padded {model.padded_vocab_size}"
        f"{', tied' if model.tie_embeddings else ''})",
        f"parameters  {num_parameters(model):,} ({inner:,} without embeddings)",
    ]
    if config.init_from is not None:
        lines.append(f"weights     from {config.init_from}, before the first step")
    return lines


def _layout_line(config: Config, who: str, data_size: int) -> str:
    parallel = config.parallel
    return (
        f"layout      {who}: tensor {parallel.tensor}"
        f"{' + sequence' if parallel.sequence else ''}, pipeline {parallel.pipeline}"
        f"{f' x {parallel.virtual_pipeline} chunks' if parallel.virtual_pipeline > 1 else ''}, "
        f"context {parallel.context}, data {data_size}"
        f"{' (distributed optimizer)' if parallel.distributed_optimizer else ''}, {config.precision}"
    )


def _batch_lines(config: Config, data_size: int, tokens_in_data: int | None) -> list[str]:
    train, total = config.train, config.total_tokens
    micro_batches = train.global_batch_samples // (train.micro_batch_samples * data_size)
    passes = (
        "data not opened"
        if tokens_in_data is None
        else f"{total / tokens_in_data:.2f} passes over {tokens_in_data:,} tokens"
    )
    return [
        f"tokens      {total:,} in {config.steps:,} steps ({passes}; "
        f"{total / num_parameters(config.model):.1f} per parameter)",
        f"batch       {train.global_batch_samples} samples x {train.sequence_tokens} tokens = "
        f"{train.step_tokens:,} tokens; micro-batches {micro_batches} of {train.micro_batch_samples}",
    ]


def _optimizer_lines(config: Config, rules: Mapping[str, ParameterRule]) -> list[str]:
    optim = config.optim
    schedule = f"{optim.schedule}, warmup {config.warmup_steps} steps"
    if config.wsd_decay_steps:
        schedule += f", decay over the last {config.wsd_decay_steps}"
    z_loss = f", z-loss {config.train.z_loss:g}" if config.train.z_loss else ""
    matrices = (
        "" if optim.matrix_lr is None else f", attention and MLP matrices {optim.matrix_lr:g}"
    )
    name = {"adamw": "AdamW", "adamh": "AdamH", "muon": "Muon"}[optim.optimizer]
    return [
        f"optimizer   {name}, lr {optim.lr:g} -> {optim.final_lr:g}{matrices} ({schedule}), betas "
        f"{optim.beta1}/{optim.beta2}, clip {optim.clip_grad_norm:g}{z_loss}",
        *_decay_lines(config, rules),
    ]


def _decay_lines(config: Config, rules: Mapping[str, ParameterRule], limit: int = 8) -> list[str]:
    """What each rule decided: one line each, up to a limit."""
    optim = config.optim
    times = (
        "lr x weight_decay" if optim.decay_mode == "coupled" else "weight_decay, whatever the lr"
    )
    shape = optim.decay_schedule.shape
    lines = [f"decay       {times} per step, {shape}; by rule (every parameter: weight_decay.tsv):"]
    decided: dict[tuple[str, float, float], list[ParameterRule]] = {}
    for rule in rules.values():
        decided.setdefault((rule.rule, rule.weight_decay, rule.lr_multiplier), []).append(rule)
    for (label, decay, multiplier), rows in list(decided.items())[:limit]:
        values = sum(math.prod(row.shape) for row in rows)
        rate = "" if multiplier == 1.0 else f", lr x {multiplier:g}"
        lines.append(
            f"            {decay:g} on {len(rows)} tensors, {values:,} values ({label}{rate})"
        )
    if len(decided) > limit:
        lines.append(f"            and {len(decided) - limit} more")
    return lines


def _memory_line(config: Config, ranks: int) -> str:
    largest = max(stage.total_bytes for stage in pipeline_memory(config, ranks))
    return (
        f"memory      about {largest / 1e9:.2f} GB of tensors per rank, besides the libraries; "
        f"checkpoint {checkpoint_bytes(config) / 1e9:.2f} GB"
    )
