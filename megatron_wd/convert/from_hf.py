"""From a Hugging Face folder to a Megatron checkpoint of our layout, one tensor at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_wd
from megatron_wd.config import UserError
from megatron_wd.convert import hf_folder
from megatron_wd.convert.dcp_writer import TensorWriter
from megatron_wd.convert.families import converted_family
from megatron_wd.convert.output_folder import appears_when_done, check_target, files_of
from megatron_wd.convert.safetensors_file import DTYPES
from megatron_wd.convert.shape import shape_yaml
from megatron_wd.convert.to_hf import Progress
from megatron_wd.convert.weights import Weights, is_hf_folder, open_weights

MARK = "provenance.json"


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote.

    Attributes:
        folder: The checkpoint.
        source: The Hugging Face folder it was made from.
        family: Name of the family, as in `model.family`.
        dtypes: Of the weights, by their torch names.
        num_tensors: Tensors in Megatron's naming.
        weight_bytes: Bytes of all tensors.
        notes: What a user would want to know of it, in sentences.
        seconds: Wall time.
    """

    folder: str
    source: str
    family: str
    dtypes: list[str]
    num_tensors: int
    weight_bytes: int
    notes: list[str]
    seconds: float


def import_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Writes a Megatron checkpoint that runs of any layout can start from.

    `out` appears only when all of it is written. Memory: about two of the largest tensors.
    No code of the source runs, and only safetensors are read.

    Args:
        source: A Hugging Face folder.
        out: The checkpoint to write; must not exist, or be empty, unless `force`.
        force: Whether an earlier import in `out` is replaced.
        progress: Called with bytes written and bytes in all, after each tensor.

    Raises:
        UserError: If the folder is damaged, its model is not supported, or `out` is in the way.
    """
    started = time.perf_counter()
    path, target = Path(source), Path(out)
    check_target(target, force, MARK)
    if path.is_dir() and not is_hf_folder(path):
        raise UserError(f"{path} is no Hugging Face folder: it has no config.json.")
    weights = open_weights(path)
    sizes = {t.name: t.num_values * DTYPES[weights.dtype(t.name)][1] for t in weights.tensors}
    total, written = sum(sizes.values()), 0
    notes = _notes(weights)
    with appears_when_done(target, total, force) as partial:
        with TensorWriter(partial) as writer:
            for tensors, values in weights.read_ahead():
                writer.write(tensors.name, values)
                written += sizes[tensors.name]
                if progress is not None:
                    progress(written, total)
            writer.write_objects(_object_names(weights), None)
            writer.write_objects(["common_state"], {})
        (partial / "config.yaml").write_text(shape_yaml(weights.model), encoding="utf-8")
        _copy_tokenizer(weights, partial)
        facts = _provenance(path, weights)
        hf_folder.write_json(partial / MARK, {**facts, "files": files_of(partial, MARK)})
    return ImportReport(
        folder=str(target),
        source=str(path),
        family=weights.model.family,
        dtypes=sorted(weights.dtypes),
        num_tensors=len(sizes),
        weight_bytes=total,
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _object_names(weights: Weights) -> list[str]:
    """Megatron asks for an `_extra_state` (fp8 scales; here none) beside each linear layer."""
    modules = {name.rpartition(".")[0] for name in weights.names if name.endswith(".weight")}
    linear = {m for m in modules if m.rpartition(".")[2].startswith(("linear_", "output_layer"))}
    # Transformer Engine's attention has one too.
    cores = {m.replace("linear_qkv", "core_attention") for m in linear if m.endswith("linear_qkv")}
    # A tied output layer has no tensor of its own, but the module is there.
    return sorted(f"{module}._extra_state" for module in linear | cores | {"output_layer"})


def _notes(weights: Weights) -> list[str]:
    notes = []
    if weights.has_fp16:
        notes.append("fp16 weights became fp32, which holds all of their values")
    if weights.tokenizer is None:
        notes.append("the folder has no tokenizer")
    return notes


def _copy_tokenizer(weights: Weights, out: Path) -> None:
    """Copies the tokenizer's files as they are; `load_tokenizer` and to-hf read them."""
    if weights.tokenizer is None:
        return
    (out / "tokenizer").mkdir()
    for name in hf_folder.TOKENIZER_FILES:
        file = weights.tokenizer / name
        if file.is_file():
            shutil.copyfile(file, out / "tokenizer" / name)


def _provenance(path: Path, weights: Weights) -> dict[str, Any]:
    config = (path / "config.json").read_bytes()
    return {
        "source": path.resolve().name,
        "source_architecture": converted_family(weights.model.family).architecture,
        "source_config_sha256": hashlib.sha256(config).hexdigest(),
        "dtype": ", ".join(sorted(weights.dtypes)),
        "megatron_wd": megatron_wd.__version__,
        "packages": {"torch": metadata.version("torch")},
    }
