"""Reads the weights of a Hugging Face folder, one tensor at a time, from safetensors files only.

The safetensors package maps files into memory, so that a model is resident by the end of it. Here
the headers are read and checked, and a tensor's bytes go straight into memory of its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wd.config import UserError

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Names in the format -> torch dtype by name, bytes per scalar.
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
_MAX_HEADER_BYTES = 100 * 10**6  # the limit of the format


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: shape, dtype by its torch name, and where its bytes begin."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start_bytes: int
    length_bytes: int


class SafetensorsFolder:
    """The tensors of a folder.

    Attributes:
        folder: The folder.
        tensors: Every tensor by name; only the list is in memory.
    """

    def __init__(self, folder: Path):
        """Reads the headers of all files.

        Raises:
            UserError: If there are no such files, or one is missing, cut off or damaged.
        """
        self.folder = folder
        weight_map = _weight_map(folder)
        files = sorted(set(weight_map.values())) if weight_map is not None else [_SINGLE]
        self.tensors: dict[str, FileTensor] = {}
        for name in files:
            path = folder / name
            if not path.is_file():
                raise UserError(f"{path} is missing; {_INDEX} names it.")
            for tensor, entry in read_header(path).items():
                if tensor in self.tensors:
                    other = self.tensors[tensor].file.name
                    raise UserError(f"{folder}: tensor {tensor} is in {other} and in {name}.")
                self.tensors[tensor] = entry
        if weight_map is not None:
            _check_index(folder, weight_map, self.tensors)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Reads one tensor into CPU memory; fp16 becomes fp32, which holds all of its values.

        Args:
            name: Its name.
            out: Where to, of its shape and contiguous; None for memory of its own.

        Raises:
            UserError: If it cannot be read.
        """
        import torch

        entry = self.tensors[name]
        dtype = getattr(torch, entry.dtype)
        direct = out is not None and out.dtype == dtype
        tensor = out if direct and out is not None else torch.empty(entry.shape, dtype=dtype)
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start_bytes)
            while view:
                count = file.readinto(view)
                if not count:
                    raise UserError(f"{entry.file} ends within tensor {name}.")
                view = view[count:]
        if out is not None:
            return out if direct else out.copy_(tensor)
        return tensor.float() if entry.dtype == "float16" else tensor

    def dtype(self, name: str) -> str:
        """Dtype by its torch name, of what `read` returns."""
        dtype = self.tensors[name].dtype
        return "float32" if dtype == "float16" else dtype


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the index, or None for a single file; refuses whatever else there is."""
    path = folder / _INDEX
    if not path.is_file():
        if (folder / _SINGLE).is_file():
            return None
        _refuse_other_weights(folder)
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}.") from None
    for file in names.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path} names {file!r}, which is no safetensors file beside it.")
    return names


def _refuse_other_weights(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        raise UserError(
            f"{folder} has {shards[0].name}, but no {_INDEX}, which says what is complete. Copy the "
            f"index too."
        )
    pickles = sorted(p for ending in ("bin", "pt", "pth") for p in folder.glob(f"*.{ending}"))
    if pickles:
        raise UserError(
            f"{folder} has its weights in {pickles[0].name}, a pickle, which could run code when it "
            f"is loaded. Get the model as safetensors; if you trust the file, load it with "
            f"transformers and save_pretrained() it once."
        )
    raise UserError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}.")


def _check_index(folder: Path, weight_map: dict[str, str], found: dict[str, FileTensor]) -> None:
    for name, file in weight_map.items():
        if name not in found:
            raise UserError(f"{folder}: {_INDEX} names tensor {name}, but {file} does not hold it.")
        if found[name].file.name != file:
            raise UserError(
                f"{folder}: {_INDEX} says that tensor {name} is in {file}, but it is in "
                f"{found[name].file.name}."
            )
    for name, entry in found.items():
        if name not in weight_map:
            raise UserError(f"{entry.file} holds tensor {name}, which {_INDEX} does not name.")


def read_header(path: Path) -> dict[str, FileTensor]:
    """Reads the list of tensors of one safetensors file, and checks that all of them are there.

    Raises:
        UserError: If the file is cut off or damaged, or holds a dtype that is not supported.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise UserError(f"{path} is no safetensors file, or was cut off: it has {size} bytes.")
        text = file.read(header_bytes)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: _entry(path, 8 + header_bytes, name, value) for name, value in header.items()
        }
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its header is damaged: {error!r}.") from None
    end = 8 + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start_bytes):
        if entry.start_bytes != end:
            raise UserError(
                f"{path}: its header is damaged: tensor {name} does not begin where the one before ends."
            )
        end += entry.length_bytes
    if size != end:
        state = "was cut off" if size < end else "is damaged"
        raise UserError(f"{path} {state}: it has {size} bytes, but its header asks for {end}.")
    return entries


def _entry(path: Path, data_start: int, name: str, value: Any) -> FileTensor:
    if value["dtype"] not in _DTYPES:
        raise UserError(
            f"{path}: tensor {name} has dtype {value['dtype']}, which is not supported; F32, BF16 "
            f"and F16 are."
        )
    dtype, scalar_bytes = _DTYPES[value["dtype"]]
    shape = tuple(value["shape"])
    begin, end = value["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has impossible numbers")
    if end - begin != math.prod(shape) * scalar_bytes:
        raise ValueError(f"tensor {name} has another size than its shape")
    return FileTensor(path, shape, dtype, data_start + begin, end - begin)
