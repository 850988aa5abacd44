"""From a Megatron checkpoint to a Hugging Face folder, in one process, one tensor at a time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_wd.config import UserError
from megatron_wd.convert import hf_folder
from megatron_wd.convert.checkpoint import Checkpoint, open_checkpoint
from megatron_wd.convert.dcp import TensorFolder
from megatron_wd.convert.names import match_checkpoint
from megatron_wd.convert.safetensors_file import (
    DTYPES,
    Entry,
    ShardPlan,
    ShardWriter,
    index_json,
    plan_shards,
)

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
DEFAULT_SHARD_BYTES = 5 * 10**9

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        folder: The Hugging Face folder.
        checkpoint: The checkpoint it was made from.
        step: Training step, or None if unknown.
        dtype: Of the weights, by its torch name.
        num_tensors: Tensors in Hugging Face's naming.
        num_files: Weight files.
        weight_bytes: Bytes of all tensors.
        seconds: Wall time.
    """

    folder: str
    checkpoint: str
    step: int | None
    dtype: str
    num_tensors: int
    num_files: int
    weight_bytes: int
    seconds: float


def export_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Exports a checkpoint of any layout for transformers.

    `out` appears only when all of it is written. Memory: about the largest tensor, twice where it
    is stored in several parts.

    Args:
        source: A run folder, its `checkpoints` folder, or one checkpoint.
        out: The Hugging Face folder to write; must not exist, or be empty, unless `force`.
        step: The checkpoint of this step; None for the latest.
        dtype: "fp32" or "bf16"; None for that of the checkpoint.
        max_shard_bytes: Most bytes of tensors in one file.
        tokenizer: Used instead of the checkpoint's own.
        force: Whether an earlier export in `out` is replaced.
        progress: Called with bytes written and bytes in all, after each tensor.

    Raises:
        UserError: If the checkpoint is not complete or not convertible, or `out` is in the way.
    """
    started = time.perf_counter()
    target = Path(out)
    _check_target(target, force)
    checkpoint = open_checkpoint(Path(source), step)
    folder = TensorFolder(checkpoint.folder)
    shapes = {name: stored.shape for name, stored in folder.tensors.items()}
    matched = match_checkpoint(checkpoint.config.model, shapes)
    names = [name for name, _ in matched]
    folder.check_files(names)
    dtype_name = _output_dtype(folder, names, dtype)
    entries = [Entry(name, shape) for _, tensors in matched for name, shape in tensors.hf]
    plan = plan_shards(entries, dtype_name, max_shard_bytes)

    with _appears_when_done(target, plan.total_bytes, force) as partial:
        _write_surroundings(checkpoint, partial, dtype_name, tokenizer)
        written = 0
        with ShardWriter(partial, plan, dtype_name) as writer:
            for name, tensors in matched:
                parts = tensors.unpack(folder.read(name), checkpoint.config.model)
                for hf_name, part in parts.items():
                    writer.write(hf_name, part)
                    written += Entry(hf_name, tuple(part.shape)).num_bytes(dtype_name)
                    if progress is not None:
                        progress(written, plan.total_bytes)
        _write_index(partial, plan)
        hf_folder.write_mark(partial, hf_folder.provenance_of(checkpoint, dtype_name))
    return ExportReport(
        folder=str(target),
        checkpoint=str(checkpoint.folder),
        step=checkpoint.step,
        dtype=dtype_name,
        num_tensors=len(entries),
        num_files=len(plan.files),
        weight_bytes=plan.total_bytes,
        seconds=time.perf_counter() - started,
    )


def _output_dtype(folder: TensorFolder, names: list[str], wanted: str | None) -> str:
    if wanted is not None:
        return DTYPE_NAMES[wanted]
    stored = {folder.tensors[name].dtype for name in names}
    # Norms may be kept in fp32 beside bf16 matrices; the wider one loses nothing.
    if not stored <= set(DTYPES):
        unknown = ", ".join(sorted(stored - set(DTYPES)))
        raise UserError(
            f"{folder.folder} stores weights as {unknown}; choose --dtype fp32 or bf16."
        )
    return "float32" if "float32" in stored else "bfloat16"


def _write_surroundings(
    checkpoint: Checkpoint, out: Path, dtype: str, tokenizer: str | os.PathLike[str] | None
) -> None:
    """Writes tokenizer, configs and model card."""
    source = Path(tokenizer) if tokenizer is not None else checkpoint.tokenizer
    if source is None:
        raise UserError(
            f"{checkpoint.folder} has no tokenizer folder; name its tokenizer with --tokenizer."
        )
    ids = hf_folder.write_tokenizer(source, checkpoint.config.model, out)
    config = hf_folder.llama_config(
        checkpoint.config.model,
        max_positions=checkpoint.config.train.sequence_tokens,
        dtype=dtype,
        ids=ids,
    )
    hf_folder.write_json(out / "config.json", config)
    hf_folder.write_json(out / "generation_config.json", hf_folder.generation_config(ids))
    card = hf_folder.model_card(hf_folder.provenance_of(checkpoint, dtype), config)
    (out / "README.md").write_text(card, encoding="utf-8")


def _write_index(out: Path, plan: ShardPlan) -> None:
    if len(plan.files) > 1:
        (out / "model.safetensors.index.json").write_text(index_json(plan), encoding="utf-8")


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file; give a folder that does not exist yet.")
    if not force:
        raise UserError(
            f"{target} exists and is not empty; give another folder, or --force to replace an "
            f"earlier export."
        )
    hf_folder.refuse_foreign(target)


@contextmanager
def _appears_when_done(target: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """Gives a temporary folder beside `target`, which becomes it at the end, or vanishes."""
    target = target.absolute()
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise UserError(
                f"{target.parent} has {free / 1e9:.2f} GB free, but the export takes "
                f"{needed_bytes / 1e9:.2f} GB."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        if force and target.exists():
            replaced = target.parent / f".{target.name}.replaced-{os.getpid()}"
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
