"""Finds a checkpoint, and what it says about itself: config, tokenizer, step, provenance."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import Config, ModelConfig, UserError
from megatron_wd.convert import megatron_lm
from megatron_wd.convert.dcp import METADATA
from megatron_wd.convert.shape import read_shape

_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder, which describes itself wherever it lies.

    Attributes:
        folder: The folder with the tensors.
        step: Training step, or None if nothing says it.
        model: Shape of the model.
        config: Resolved config of the run; None where weights came from elsewhere.
        tokenizer: Folder with the tokenizer's files, or None if there is none.
        provenance: What the run recorded about itself (versions, git commit); may be empty.
    """

    folder: Path
    step: int | None
    model: ModelConfig
    config: Config | None
    tokenizer: Path | None
    provenance: dict[str, Any]

    @property
    def tokens(self) -> int | None:
        """Tokens trained on until this checkpoint; None if nothing says it."""
        if self.config is None:
            tokens = self.provenance.get("tokens")
            return tokens if isinstance(tokens, int) else None
        return None if self.step is None else self.step * self.config.train.step_tokens

    @property
    def said_by(self) -> str:
        """What says the shape of the model, for messages."""
        return "config.yaml" if (self.folder / "config.yaml").is_file() else "saved arguments"


def open_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Finds a checkpoint and reads its description, but no tensor.

    Args:
        path: A run folder, its `checkpoints` folder, or one checkpoint moved anywhere.
        step: The checkpoint of this step; None for the latest complete one.

    Raises:
        UserError: If there is none, or it does not describe itself.
    """
    folder = find_checkpoint(path, step)
    match = _ITERATION.fullmatch(folder.resolve().name)
    number = int(match[1]) if match else None
    tokenizer = folder / "tokenizer" if (folder / "tokenizer").is_dir() else None
    config_file = folder / "config.yaml"
    if config_file.is_file():
        model, config = read_shape(config_file)
        return Checkpoint(folder, number, model, config, tokenizer, _read_provenance(folder))
    run = megatron_lm.read_run(folder)
    if run is None:
        raise UserError(
            f"{folder} has no config.yaml, which says what model it is. Copy the run's config.yaml "
            f"into it if you have it, or write one that holds its `model:` section."
        )
    return Checkpoint(
        folder=folder,
        step=run.step if number is None else number,
        model=megatron_lm.shape_from_arguments(run.arguments, str(folder)),
        config=None,
        tokenizer=tokenizer,
        provenance=run.provenance(),
    )


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Returns the folder of one checkpoint; the arguments are those of `open_checkpoint`.

    Raises:
        UserError: If there is none.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; give a run folder or a checkpoint folder.")
    if _is_checkpoint(path):
        match = _ITERATION.fullmatch(path.resolve().name)
        if step is not None and match and int(match[1]) != step:
            raise UserError(f"{path} is one checkpoint, and not the one of --step {step}.")
        return path
    parent, steps = _children(path)
    listed = ", ".join(str(number) for number in sorted(steps)) or "none"
    if step is None and _is_release(parent):
        return parent / "release"
    if step is None and (parent / _LATEST).is_file():
        step = _latest_step(parent / _LATEST)
    if step is None:
        remedy = f" Choose one with --step; there are: {listed}." if steps else ""
        raise UserError(f"{path} holds no finished checkpoint: there is no {_LATEST}.{remedy}")
    if step not in steps:
        raise UserError(f"{parent} has no checkpoint of step {step}; it has: {listed}.")
    return steps[step]


def steps_in(path: Path) -> list[int]:
    """Steps of the checkpoints in a run folder or its `checkpoints` folder; none in a checkpoint."""
    return [] if _is_checkpoint(path) else sorted(_children(path)[1])


def _children(path: Path) -> tuple[Path, dict[int, Path]]:
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = {
        int(match[1]): child
        for child in parent.iterdir()
        if child.is_dir() and (match := _ITERATION.fullmatch(child.name))
    }
    return parent, steps


def _is_checkpoint(path: Path) -> bool:
    """Whether `path` is meant as one checkpoint; whether it is complete shows when it is read."""
    has_tensors = (path / METADATA).is_file() or any(path.glob("*.distcp"))
    return has_tensors or bool(_ITERATION.fullmatch(path.resolve().name))


def _is_release(parent: Path) -> bool:
    """Whether this is a folder of Megatron-LM's with weights that no run of it made."""
    tracker = parent / _LATEST
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    return text == "release" and (parent / "release").is_dir()


def _latest_step(path: Path) -> int:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise UserError(f"{path} holds {text[:40]!r} instead of a step; choose one with --step.")
    return int(text)


def _read_provenance(folder: Path) -> dict[str, Any]:
    """Reads provenance.json beside the tensors, or else that of the run folder around them."""
    for place in (folder, folder.resolve().parent.parent):
        file = place / "provenance.json"
        if file.is_file():
            try:
                value = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                raise UserError(f"{file} is damaged: it is not JSON.") from None
            return value if isinstance(value, dict) else {}
    return {}
