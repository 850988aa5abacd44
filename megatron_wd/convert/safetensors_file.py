"""Writes safetensors files one tensor at a time.

The safetensors package writes a file from tensors that are all in memory. Here the header is
written first, from names and shapes, and each tensor follows when it is there: memory for one
tensor, not for one file. Format: 8 bytes with the header's length (little endian), the header as
JSON (name -> dtype, shape, begin and end of its bytes after the header), then the bytes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_wd.convert.output_folder import write_all

if TYPE_CHECKING:
    from torch import Tensor

# dtype by its torch name -> its name in the format, and bytes per scalar
DTYPES: dict[str, tuple[str, int]] = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True)
class Entry:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]

    def num_bytes(self, dtype: str) -> int:
        """Its size on disk, for a dtype by its torch name."""
        return math.prod(self.shape) * DTYPES[dtype][1]


@dataclass
class ShardPlan:
    """Which tensor goes into which file.

    Attributes:
        files: File name and entries of each file, in writing order.
        total_bytes: Bytes of all tensors.
    """

    files: list[tuple[str, list[Entry]]] = field(default_factory=list)
    total_bytes: int = 0


def plan_shards(entries: Sequence[Entry], dtype: str, max_bytes: int) -> ShardPlan:
    """Divides tensors, in order, into files of at most `max_bytes`, or of one larger tensor.

    Args:
        entries: All tensors.
        dtype: Their dtype, by its torch name.
        max_bytes: Limit for the tensors of one file.
    """
    groups: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        size = entry.num_bytes(dtype)
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += size
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    total = sum(entry.num_bytes(dtype) for entry in entries)
    return ShardPlan(list(zip(names, groups, strict=True)), total)


def index_json(plan: ShardPlan) -> str:
    """Returns the text of model.safetensors.index.json for a model in several files."""
    weight_map = {entry.name: name for name, entries in plan.files for entry in entries}
    content = {"metadata": {"total_size": plan.total_bytes}, "weight_map": weight_map}
    return json.dumps(content, indent=2) + "\n"


class ShardWriter:
    """Writes the files of a plan; tensors must come in the plan's order.

    Use it as a context manager, so that the last file is closed.
    """

    def __init__(self, folder: Path, plan: ShardPlan, dtype: str):
        """Starts with the first file.

        Args:
            folder: Where the files go.
            plan: What goes where.
            dtype: What tensors are converted to, by its torch name.
        """
        self._folder, self._dtype = folder, dtype
        self._left = [(name, entry) for name, entries in plan.files for entry in entries]
        self._entries = dict(plan.files)
        self._left.reverse()
        self._name = ""
        self._file: io.FileIO | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor, converted to the files' dtype."""
        import torch

        file_name, entry = self._left.pop()
        assert (name, tuple(tensor.shape)) == (entry.name, entry.shape), (name, tensor.shape, entry)
        if file_name != self._name:
            self.close()
            self._name = file_name
            self._file = (self._folder / file_name).open("wb", buffering=0)
            write_all(self._file, memoryview(_header(self._entries[file_name], self._dtype)))
        assert self._file is not None
        values = tensor.to(getattr(torch, self._dtype)).contiguous()
        write_all(self._file, memoryview(values.view(-1).view(torch.uint8).numpy()))

    def close(self) -> None:
        """Closes the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _header(entries: Sequence[Entry], dtype: str) -> bytes:
    # transformers refuses a file without "format".
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.num_bytes(dtype)
        header[entry.name] = {
            "dtype": DTYPES[dtype][0],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
