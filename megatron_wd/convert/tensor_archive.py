"""Reads a tensor from a `torch.save` archive inside a file, without torch's unpickler.

The archive is a zip: `data.pkl` says shape, dtype and storage, `data/0` holds the values as they lie
in memory. The pickle is read as inert records, and the values go straight from the file into memory
of the caller's, which is also what makes reading as fast as copying.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from megatron_wd.convert.pickles import InertUnpickler, stored_records

if TYPE_CHECKING:
    from torch import Tensor

_STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "BFloat16Storage": ("bfloat16", 2),
    "HalfStorage": ("float16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}
STORAGES_BY_DTYPE = {dtype: name for name, (dtype, _) in _STORAGES.items()}


class Window(io.RawIOBase):
    """A part of an open file as a file of its own, so that no copy of its bytes is made."""

    def __init__(self, file: IO[bytes], start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """True: it is for reading only."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position in the part."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves within the part."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads up to the end of the part."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


@dataclass(frozen=True)
class StoredValues:
    """A tensor in an archive.

    Attributes:
        shape: Its shape.
        dtype: Its dtype by its torch name.
        start_bytes: Where its values begin in the file that the archive is in.
        length_bytes: How many bytes they are.
    """

    shape: tuple[int, ...]
    dtype: str
    start_bytes: int
    length_bytes: int


class ArchiveError(ValueError):
    """The archive is damaged, or holds something else than a plain tensor."""


def locate_tensor(file: IO[bytes], start: int, length: int) -> StoredValues:
    """Finds the one tensor of an archive.

    Args:
        file: An open file.
        start: First byte of the archive in it.
        length: Bytes of the archive.

    Raises:
        ArchiveError: If there is no plain, contiguous tensor in it.
    """
    window = cast(IO[bytes], Window(file, start, length))
    try:
        records = stored_records(window)
        if _read(window, records.get("byteorder", (0, 0))) not in (b"little", b""):
            raise ArchiveError("its byte order is another one")
        pickled = io.BytesIO(_read(window, records["data.pkl"]))
        storage, offset, shape, stride = _TensorUnpickler(pickled, _find).load()
        (dtype, scalar_bytes), key = storage
        begin, available_bytes = records[f"data/{key}"]
        begin, count = begin + offset * scalar_bytes, math.prod(shape)
        in_order = not count or _is_contiguous(shape, stride)
    except ArchiveError:
        raise
    except Exception as error:
        # A damaged archive can fail in any way at all; nothing in it is ours to debug.
        raise ArchiveError(str(error) or type(error).__name__) from error
    if not in_order:
        raise ArchiveError("its values are not in order")
    if (offset + count) * scalar_bytes > available_bytes or begin + count * scalar_bytes > length:
        raise ArchiveError("it is too short for its shape")
    return StoredValues(tuple(shape), dtype, start + begin, count * scalar_bytes)


def _read(file: IO[bytes], record: tuple[int, int]) -> bytes:
    file.seek(record[0])
    return file.read(record[1])


def read_values(file: IO[bytes], stored: StoredValues, out: Tensor) -> None:
    """Reads values into a tensor of their shape and dtype.

    Args:
        file: The file that `stored` is of.
        stored: What to read.
        out: Where to; need not be contiguous.

    Raises:
        ArchiveError: If the file ends within them.
    """
    import torch

    direct = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    view = memoryview(direct.view(-1).view(torch.uint8).numpy()) if out.numel() else memoryview(b"")
    file.seek(stored.start_bytes)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise ArchiveError("the file ends within it")
        view = view[count:]
    if direct is not out:
        out.copy_(direct)


class _TensorUnpickler(InertUnpickler):
    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, tuple):
            raise ArchiveError("its storage is of an unknown kind")
        return storage, key


def _find(module: str, name: str) -> Any:
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return lambda storage, offset, shape, stride, *_: (storage, offset, shape, stride)
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    raise ArchiveError(f"it asks for {module}.{name}")


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
