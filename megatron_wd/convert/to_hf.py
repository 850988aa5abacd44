"""From a Megatron checkpoint to a Hugging Face folder, in one process, one tensor at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_wd.config import UserError
from megatron_wd.convert import hf_folder
from megatron_wd.convert.checkpoint import Checkpoint, open_checkpoint
from megatron_wd.convert.families import converted_family
from megatron_wd.convert.hf_config import export_config
from megatron_wd.convert.output_folder import appears_when_done, check_target
from megatron_wd.convert.safetensors_file import (
    DTYPES,
    Entry,
    ShardPlan,
    ShardWriter,
    index_json,
    plan_shards,
)
from megatron_wd.convert.weights import Weights, is_hf_folder, weights_of

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

    `out` appears only when all of it is written. Memory: about two of the largest tensors.

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
    check_target(target, force, hf_folder.MARK)
    if is_hf_folder(Path(source)):
        raise UserError(f"{source} is a Hugging Face folder already; there is nothing to export.")
    checkpoint = open_checkpoint(Path(source), step)
    weights = weights_of(checkpoint)
    dtype_name = _output_dtype(weights, dtype)
    entries = [Entry(name, shape) for tensors in weights.tensors for name, shape in tensors.hf]
    plan = plan_shards(entries, dtype_name, max_shard_bytes)

    with appears_when_done(target, plan.total_bytes, force) as partial:
        _write_surroundings(checkpoint, partial, dtype_name, tokenizer)
        written = 0
        with ShardWriter(partial, plan, dtype_name) as writer:
            for tensors, values in weights.read_ahead():
                parts = tensors.unpack(values, weights.model)
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


def _output_dtype(weights: Weights, wanted: str | None) -> str:
    if wanted is not None:
        return DTYPE_NAMES[wanted]
    # Norms may be kept in fp32 beside bf16 matrices; the wider one loses nothing.
    if not weights.dtypes <= set(DTYPES):
        unknown = ", ".join(sorted(weights.dtypes - set(DTYPES)))
        raise UserError(f"{weights.path} stores weights as {unknown}; choose --dtype fp32 or bf16.")
    return "float32" if "float32" in weights.dtypes else "bfloat16"


def _write_surroundings(
    checkpoint: Checkpoint, out: Path, dtype: str, tokenizer: str | os.PathLike[str] | None
) -> None:
    """Writes tokenizer, configs and model card."""
    source = Path(tokenizer) if tokenizer is not None else checkpoint.tokenizer
    if source is None:
        raise UserError(
            f"{checkpoint.folder} has no tokenizer folder; name its tokenizer with --tokenizer."
        )
    model, run = checkpoint.model, checkpoint.config
    ids = hf_folder.write_tokenizer(source, model, out)
    positions = model.max_positions
    if positions is None:
        if run is None:
            raise UserError(
                f"{checkpoint.folder}: nothing says how long sequences may be; set "
                f"model.max_positions in its config.yaml."
            )
        positions = run.train.sequence_tokens
    config = export_config(model, max_positions=positions, dtype=dtype, ids=ids)
    hf_folder.write_json(out / "config.json", config)
    hf_folder.write_json(out / "generation_config.json", hf_folder.generation_config(ids))
    facts = hf_folder.provenance_of(checkpoint, dtype)
    card = hf_folder.model_card(facts, model, converted_family(model.family).architecture)
    (out / "README.md").write_text(card, encoding="utf-8")


def _write_index(out: Path, plan: ShardPlan) -> None:
    if len(plan.files) > 1:
        (out / "model.safetensors.index.json").write_text(index_json(plan), encoding="utf-8")
