"""Reads tensors from a torch.distributed.checkpoint folder, without ranks and without trust.

Such a folder holds `.metadata`, a pickle that says which part of which tensor lies where, and
`*.distcp` files, in which each part is a little `torch.save` archive. The layout that wrote it does
not matter: the parts of a tensor are put together from whichever files hold them.

torch's own reader unpickles `.metadata` without restriction, and Megatron's reads the objects
beside the tensors in the same way, so that a stranger's checkpoint could run code. Here the pickle
can only name what such an index consists of, and even that becomes inert records; so do the parts
of tensors, and the objects beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_wd.config import UserError
from megatron_wd.convert.pickles import InertUnpickler, Record, read_archive, record_class
from megatron_wd.convert.tensor_archive import (
    ArchiveError,
    Window,
    locate_tensor,
    read_values,
)

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
# As `torch.empty`: takes a shape, and a dtype by keyword.
Allocate = Callable[..., "Tensor"]


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor and the bytes of a file that hold it as a `torch.save` archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: shape, dtype by its torch name ("float32"), and its blocks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


class TensorFolder:
    """The tensors of one torch.distributed.checkpoint folder.

    Attributes:
        folder: The folder.
        tensors: Every tensor in it by name, those of the optimizer too; only the list is in memory.
        objects: Where the objects lie that are no tensors, by name.
    """

    def __init__(self, folder: Path):
        """Reads the list of tensors.

        Args:
            folder: Folder with `.metadata` and `*.distcp` files.

        Raises:
            UserError: If it is no such folder, or is damaged, or its pickle asks for other classes.
        """
        self.folder = folder
        path = folder / METADATA
        if not path.is_file():
            raise UserError(
                f"{folder} is not a complete checkpoint: it has no {METADATA} file, which is "
                f"written last. Give another checkpoint, for example with --step."
            )
        with path.open("rb") as file:
            self.tensors, self.objects = _read_index(file, path)

    def check_files(self, names: Iterable[str]) -> None:
        """Checks that the files of some tensors are there in full length.

        Raises:
            UserError: If a file is missing or too short.
        """
        needed: dict[str, int] = {}
        for name in names:
            for chunk in self.tensors[name].chunks:
                end = chunk.start_bytes + chunk.length_bytes
                needed[chunk.file] = max(needed.get(chunk.file, 0), end)
        for file, length in sorted(needed.items()):
            path = self.folder / file
            if not path.is_file():
                raise UserError(f"{path} is missing: the checkpoint is not complete.")
            if path.stat().st_size < length:
                raise UserError(
                    f"{path} has {path.stat().st_size} bytes, but {length} are needed: it was cut "
                    f"off, for example by a full disk or an interrupted copy."
                )

    def read(self, name: str, layer: int | None = None, allocate: Allocate | None = None) -> Tensor:
        """Reads one tensor into CPU memory.

        Args:
            name: Its name.
            layer: Index on axis 0, of which alone is read; None for the whole.
            allocate: Gives the memory; None for `torch.empty`.

        Raises:
            UserError: If a part of it cannot be read or does not fit.
        """
        import torch

        stored = self.tensors[name]
        first = 0 if layer is None else layer
        count = stored.shape[0] if layer is None and stored.shape else 1
        shape = (count, *stored.shape[1:]) if stored.shape else ()
        whole = (allocate or torch.empty)(shape, dtype=getattr(torch, stored.dtype))
        for chunk in stored.chunks:
            begin = chunk.offsets[0] - first if shape else 0
            length = chunk.sizes[0] if shape else 1
            if begin >= count or begin + length <= 0:
                continue
            if begin < 0 or begin + length > count:
                # The chunk holds more layers than the one that is wanted.
                block = torch.empty(chunk.sizes, dtype=whole.dtype)
                self._read_chunk(name, stored, chunk, block)
                own = _block(chunk.offsets[1:], chunk.sizes[1:])
                whole[(slice(None), *own)] = block[-begin : count - begin]
                continue
            place = (begin, *chunk.offsets[1:]) if shape else ()
            self._read_chunk(name, stored, chunk, whole[_block(place, chunk.sizes)])
        return whole if layer is None else whole[0]

    def _read_chunk(self, name: str, stored: StoredTensor, chunk: Chunk, out: Tensor) -> None:
        """Reads one chunk into `out`, which has its shape."""
        path = self.folder / chunk.file
        try:
            with path.open("rb", buffering=0) as file:
                values = locate_tensor(file, chunk.start_bytes, chunk.length_bytes)
                if (values.shape, values.dtype) != (tuple(chunk.sizes), stored.dtype):
                    raise UserError(f"{path}: tensor {name} is not what {METADATA} says it is.")
                read_values(file, values, out)
        except (OSError, ArchiveError) as error:
            raise UserError(
                f"{path}: tensor {name} cannot be read, the file is damaged ({_first_line(error)})."
            ) from error

    def read_object(self, name: str) -> Any:
        """Reads an object that is no tensor; whatever in it is no plain data is a `Record`.

        Raises:
            UserError: If it cannot be read.
        """
        chunk = self.objects[name]
        path = self.folder / chunk.file
        try:
            with path.open("rb", buffering=0) as file:
                return read_archive(Window(file, chunk.start_bytes, chunk.length_bytes))  # type: ignore[arg-type]
        except Exception as error:
            raise UserError(
                f"{path}: {name} cannot be read, the file is damaged ({_first_line(error)})."
            ) from error


def _block(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _size(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _layout(name: str) -> str:
    return name


def _find_in_index(module: str, name: str) -> Any:
    """What an index consists of; a pickle that asks for anything else is refused."""
    if name in _CLASSES.get(module, ()):
        return record_class(name)
    if (module, name) == ("torch", "Size"):
        return _size
    if (module, name) == ("torch.serialization", "_get_layout"):
        return _layout
    if module == "torch" and name in _DTYPES:
        return name
    raise _Refused(f"{module}.{name}")


_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
}


class _Refused(Exception):
    """The pickle asked for a class that no checkpoint needs."""


_FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
_INTEGERS = {"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"}
_DTYPES = _FLOATS | _INTEGERS


def _read_index(file: IO[bytes], path: Path) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Returns the tensors that a `.metadata` file lists, and the objects that are no tensors."""
    try:
        metadata = InertUnpickler(file, _find_in_index).load()
        places = {
            (index.get("fqn"), index.get("offset")): place
            for index, place in metadata.get("storage_data").items()
        }
        tensors, objects = {}, {}
        for name, entry in metadata.get("state_dict_metadata").items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _stored(name, entry, places)
            elif (name, None) in places:
                objects[name] = _chunk(name, (), (), places[name, None])
        return tensors, objects
    except _Refused as refused:
        raise UserError(
            f"{path} asks for {refused}, which no checkpoint needs, and was not loaded: it could "
            f"run code. Only use checkpoints from people you trust."
        ) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:
        # A damaged pickle can fail in any way at all; nothing in it is ours to debug.
        raise UserError(f"{path} is damaged: {_first_line(error)}.") from error


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Record) -> Chunk:
    if place.get("transform_descriptors"):
        raise UserError(f"{name} is stored compressed, which is not supported.")
    file = place.get("relative_path")
    if Path(file).name != file:
        raise UserError(f"{name} is said to lie outside the checkpoint, in {file!r}.")
    return Chunk(offsets, sizes, file, place.get("offset"), place.get("length"))


def _stored(name: str, entry: Record, places: dict[tuple[str, Any], Record]) -> StoredTensor:
    shape = entry.get("size")
    dtype = entry.get("properties").state[0]
    chunks = []
    for record in entry.get("chunks"):
        offsets, sizes = record.get("offsets"), record.get("sizes")
        inside = all(0 <= o <= o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
        if not inside:
            raise UserError(f"a part of tensor {name} lies outside of it.")
        if (name, offsets) not in places:
            raise UserError(f"no file is named for a part of tensor {name}.")
        chunks.append(_chunk(f"tensor {name}", offsets, sizes, places[name, offsets]))
    if dtype not in _DTYPES:
        raise UserError(f"tensor {name} has a dtype that is not supported.")
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not chunks or covered != math.prod(shape) or len({c.offsets for c in chunks}) < len(chunks):
        raise UserError(f"the parts of tensor {name} do not make up the whole of it.")
    return StoredTensor(shape, dtype, tuple(chunks))
