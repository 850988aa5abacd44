"""Reads tensors from a torch.distributed.checkpoint folder, without ranks and without trust.

Such a folder holds `.metadata`, a pickle that says which part of which tensor lies where, and
`*.distcp` files, in which each part is a little `torch.save` archive. The layout that wrote it does
not matter: the parts of a tensor are put together from whichever files hold them.

torch's own reader unpickles `.metadata` without restriction, and Megatron's reads the objects
beside the tensors in the same way, so that a stranger's checkpoint could run code. Here the pickle
can only name what such an index consists of, and even that becomes inert records; parts are read
with `weights_only=True`, and objects not at all.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from megatron_wd.config import UserError

if TYPE_CHECKING:
    from torch import Tensor

_METADATA = ".metadata"


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
    """

    def __init__(self, folder: Path):
        """Reads the list of tensors.

        Args:
            folder: Folder with `.metadata` and `*.distcp` files.

        Raises:
            UserError: If it is no such folder, or is damaged, or its pickle asks for other classes.
        """
        self.folder = folder
        path = folder / _METADATA
        if not path.is_file():
            raise UserError(
                f"{folder} is not a complete checkpoint: it has no {_METADATA} file, which is "
                f"written last. Give another checkpoint, for example with --step."
            )
        with path.open("rb") as file:
            self.tensors = _read_index(file, path)

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

    def read(self, name: str) -> Tensor:
        """Reads one tensor, whole, into CPU memory.

        Raises:
            UserError: If a part of it cannot be read or does not fit.
        """
        import torch

        stored = self.tensors[name]
        first = stored.chunks[0]
        if first.sizes == stored.shape:
            return self._read_chunk(name, stored, first)
        whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for chunk in stored.chunks:
            block = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[block] = self._read_chunk(name, stored, chunk)
        return whole

    def _read_chunk(self, name: str, stored: StoredTensor, chunk: Chunk) -> Tensor:
        import torch

        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                window = _Window(file, chunk.start_bytes, chunk.length_bytes)
                tensor = torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise UserError(
                f"{path}: tensor {name} cannot be read, the file is damaged ({_first_line(error)})."
            ) from error
        fits = (
            isinstance(tensor, torch.Tensor)
            and tuple(tensor.shape) == chunk.sizes
            and tensor.dtype == getattr(torch, stored.dtype)
        )
        if not fits:
            raise UserError(f"{path}: tensor {name} is not what {_METADATA} says it is.")
        return tensor.detach()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own, so that no copy of its bytes is made."""

    def __init__(self, file: IO[bytes], start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


class _Record:
    """What any object of the pickle becomes: its arguments and its state, and no behaviour."""

    def __init__(self, *args: Any):
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the pickled object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def _size(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _layout(name: str) -> str:
    return name


class _IndexUnpickler(pickle.Unpickler):
    """Reads `.metadata` into records. A pickle that asks for anything else is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        module, name = module_name, global_name
        if name in _CLASSES.get(module, ()):
            # A class of its own each time: whatever the pickle does to it stays in the pickle.
            return type(name, (_Record,), {})
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


def _read_index(file: IO[bytes], path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors that a `.metadata` file lists, without objects that are no tensors."""
    try:
        metadata = _IndexUnpickler(file).load()
        places = {
            (index.get("fqn"), index.get("offset")): place
            for index, place in metadata.get("storage_data").items()
        }
        return {
            name: _stored(name, entry, places)
            for name, entry in metadata.get("state_dict_metadata").items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
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


def _stored(name: str, entry: _Record, places: dict[tuple[str, Any], _Record]) -> StoredTensor:
    shape = entry.get("size")
    dtype = entry.get("properties").state[0]
    chunks = []
    for record in entry.get("chunks"):
        offsets, sizes = record.get("offsets"), record.get("sizes")
        place = places.get((name, offsets))
        if place is None:
            raise UserError(f"no file is named for a part of tensor {name}.")
        if place.get("transform_descriptors"):
            raise UserError(f"tensor {name} is stored compressed, which is not supported.")
        file = place.get("relative_path")
        if Path(file).name != file:
            raise UserError(f"tensor {name} is said to lie outside the checkpoint, in {file!r}.")
        chunks.append(Chunk(offsets, sizes, file, place.get("offset"), place.get("length")))
    if dtype not in _DTYPES:
        raise UserError(f"tensor {name} has a dtype that is not supported.")
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not chunks or covered != math.prod(shape) or len({c.offsets for c in chunks}) < len(chunks):
        raise UserError(f"the parts of tensor {name} do not make up the whole of it.")
    return StoredTensor(shape, dtype, tuple(chunks))
