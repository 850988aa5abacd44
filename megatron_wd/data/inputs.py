"""What the user named as input: files, folders, globs or a Hugging Face dataset; and its split over
jobs.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError

# Longest first, so that .jsonl.gz is not taken for something else.
_SUFFIXES = {
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json.gz": "jsonl",
    ".json.zst": "jsonl",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}
FORMATS = ("auto", "text", "jsonl", "parquet")
HF_PREFIX = "hf:"


@dataclass(frozen=True)
class InputFile:
    """One file: where it is, how it is read ("text", "jsonl" or "parquet") and its size in
    bytes.
    """

    path: str
    format: str
    size: int


@dataclass(frozen=True)
class HubDataset:
    """A dataset read by the `datasets` library, streaming."""

    name: str
    config: str | None
    split: str


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `count`, for job arrays."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads "I/N".

        Raises:
            UserError: Not two integers, or I outside 0..N-1.
        """
        try:
            index, count = (int(part) for part in text.split("/"))
        except ValueError:
            raise UserError(f"--shard {text}: expected I/N, for example 0/8") from None
        if count < 1 or not 0 <= index < count:
            raise UserError(f"--shard {text}: I counts from 0 to N-1, so 0/8 is the first of eight")
        return cls(index, count)

    def prefix(self, output: str) -> str:
        """Where this shard of `output` is written."""
        return f"{output}-{self.index:05d}-of-{self.count:05d}"

    def byte_range(self, total: int) -> tuple[int, float]:
        """The part [low, high) of `total` bytes; the last one is open, so that empty files count
        too.
        """
        low = self.index * total // self.count
        last = self.index == self.count - 1
        return low, float("inf") if last else (self.index + 1) * total // self.count


WHOLE = Shard(0, 1)


def find_inputs(names: Sequence[str], input_format: str = "auto") -> list[InputFile] | HubDataset:
    """Resolves what the user named, in the given order; folders and globs in sorted order.

    Args:
        names: Files, folders (searched through), globs; or one `hf:NAME[:CONFIG][:SPLIT]`.
        input_format: "auto" goes by the file name; others apply to every file.

    Raises:
        UserError: Nothing there, or a file of unknown type.
    """
    if input_format not in FORMATS:
        raise UserError(f"--format {input_format}: expected one of {', '.join(FORMATS)}")
    if not names:
        raise UserError("no input: name at least one file, folder, glob or hf:DATASET")
    if any(name.startswith(HF_PREFIX) for name in names):
        if len(names) > 1:
            raise UserError("a Hugging Face dataset is prepared alone: give one --input hf:NAME")
        return _parse_hub(names[0])
    found: list[InputFile] = []
    for name in names:
        found.extend(_expand(name, input_format))
    return found


def describe_inputs(inputs: list[InputFile] | HubDataset) -> dict[str, Any]:
    """A short, comparable record of the inputs, however many files there are."""
    if isinstance(inputs, HubDataset):
        return {"hub": inputs.name, "config": inputs.config, "split": inputs.split}
    digest = hashlib.sha256()
    for file in inputs:
        digest.update(f"{file.path}\0{file.size}\n".encode("utf-8", "surrogateescape"))
    return {
        "files": len(inputs),
        "bytes": sum(file.size for file in inputs),
        "sha256": digest.hexdigest(),  # over names and sizes, not over contents
        "first": inputs[0].path,
        "last": inputs[-1].path,
    }


def _parse_hub(name: str) -> HubDataset:
    parts = name.removeprefix(HF_PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"--input {name}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config = parts[1] if len(parts) == 3 and parts[1] else None
    return HubDataset(parts[0], config, parts[-1] if len(parts) > 1 and parts[-1] else "train")


def _expand(name: str, input_format: str) -> list[InputFile]:
    path = Path(name)
    if path.is_dir():
        files = []
        for folder, folders, leaves in os.walk(path):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            files += [os.path.join(folder, leaf) for leaf in leaves if not leaf.startswith(".")]
        files = [f for f in sorted(files) if input_format != "auto" or format_of(f)]
        if not files:
            known = ", ".join(sorted(_SUFFIXES))
            raise UserError(f"--input {name}: the folder holds no file of a known type ({known})")
    elif path.exists():
        files = [name]
    elif any(c in name for c in "*?["):
        files = sorted(f for f in glob.glob(name, recursive=True) if os.path.isfile(f))
        if not files:
            raise UserError(f"--input {name}: the pattern matches no file")
    else:
        raise UserError(f"--input {name}: no such file or folder")
    return [_input_file(file, input_format) for file in files]


def _input_file(file: str, input_format: str) -> InputFile:
    kind = format_of(file) if input_format == "auto" else input_format
    if kind is None:
        raise UserError(
            f"--input {file}: cannot tell its type from the name; add --format text (the whole "
            "file is "
            "one document), --format jsonl or --format parquet"
        )
    try:
        with open(file, "rb"):
            return InputFile(file, kind, os.path.getsize(file))
    except OSError as error:
        raise UserError(f"--input {file}: cannot be read ({error.strerror})") from None


def format_of(file: str) -> str | None:
    """How a file of this name is read, None if the name does not say."""
    lower = file.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if lower.endswith(suffix)), None)
