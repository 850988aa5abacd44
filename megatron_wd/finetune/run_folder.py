"""The folder of a fine-tuning run: whose it is, what it says about itself, and its checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import megatron_wd
from megatron_wd.config import UserError, load_structured, resolved_yaml
from megatron_wd.finetune.schema import FinetuneConfig

HF_FOLDER = "hf"  # the finished model, complete or absent
COMPLETE = "complete.json"  # written into a checkpoint last
# May differ when a run goes on: what they change is not computed into the weights.
_FREE_ON_RESUME = ("run_dir", "checkpoint_every_steps", "log_every_steps")
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers")


def lock_run_dir(config: FinetuneConfig) -> IO[str]:
    """Creates the run folder, or checks that it holds this run.

    Returns:
        An open file; as long as it is open, no other run can use the folder.

    Raises:
        UserError: The folder cannot be written, is in use, or belongs to another run.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"run_dir {run_dir} is in use by another run that has not ended. Stop that one, or choose "
            "another run_dir."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError for characters that no path can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"run_dir {run_dir} cannot be written: {reason}.") from None
    saved = run_dir / "config.yaml"
    if saved.is_file():
        _check_same_run(saved, config)
    write_whole(saved, resolved_yaml(config))
    return lock


def _check_same_run(saved: Path, config: FinetuneConfig) -> None:
    try:
        before = asdict(load_structured(FinetuneConfig, saved))
    except UserError:
        raise UserError(
            f"run_dir {saved.parent} holds something else than a fine-tuning run of this version; choose "
            "another run_dir."
        ) from None
    changes = [line for line in _differences(before, asdict(config)) if line]
    if changes:
        listed = "\n  ".join(changes)
        raise UserError(
            f"run_dir {saved.parent} holds a run of another config:\n  {listed}\nChoose another run_dir."
        )


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key, old in before.items():
        if prefix + key in _FREE_ON_RESUME:
            continue
        if isinstance(old, dict):
            lines += _differences(old, now[key], f"{prefix}{key}.")
        elif old != now[key]:
            lines.append(f"{prefix}{key}: {old} -> {now[key]}")
    return lines


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there with all of its content, or as it was."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def keep_record(run_dir: Path, name: str, record: dict[str, Any], same: str) -> None:
    """Writes a JSON record of the run, or checks it against the one that is there.

    Args:
        run_dir: The run's folder.
        name: File name.
        record: What to write.
        same: Key whose value may not change while a run goes on.

    Raises:
        UserError: It has changed.
    """
    path = run_dir / name
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8")).get(same)
        if before != record[same]:
            raise UserError(
                f"run_dir {run_dir}: {same} was {before} when this run began and is {record[same]} now "
                f"({name}), so it cannot go on. Bring back what has changed, or choose another run_dir."
            )
    write_whole(path, json.dumps(record, indent=2) + "\n")


def provenance(base: Path, base_sha256: str, processes: int, device: str) -> dict[str, Any]:
    """What made the run: versions, code, machine and base model. No environment variables."""
    return {
        "megatron_wd": megatron_wd.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "device": device,
        "processes": processes,
        "base_model": str(base),
        "base_model_sha256": base_sha256,
    }


def _git_commit() -> str | None:
    root = Path(megatron_wd.__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def checkpoints_dir(run_dir: Path) -> Path:
    """Where the checkpoints of a run lie."""
    return run_dir / "checkpoints"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    found = [path.parent for path in checkpoints_dir(run_dir).glob(f"checkpoint-*/{COMPLETE}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def keep_only(run_dir: Path, checkpoint: Path | None) -> None:
    """Removes all checkpoints but one: older ones, and those that a killed run was writing."""
    for path in checkpoints_dir(run_dir).glob("checkpoint-*"):
        if path != checkpoint:
            # Renamed first: half a folder must not pass for a checkpoint.
            doomed = path.with_name(f".{path.name}.removed")
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)
