"""Writes a tensor as `torch.save` does, at the speed of the disk.

torch copies every value once more where the file is a Python object, and computes a checksum that
nothing checks. Here the values go from memory into the file, between the parts of the zip archive
that `torch.load` needs: a pickle that says what the tensor is, and the directory at the end.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from megatron_wd.convert.output_folder import write_all
from megatron_wd.convert.tensor_archive import STORAGES_BY_DTYPE

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "archive"
_STORAGE_KEY = "0"
_ALIGNMENT_BYTES = 64  # torch's own, so that values may be mapped into memory
_TOO_LARGE = 0xFFFFFFFF  # "see the zip64 field", which has 64 bits for a length or an offset


def write_tensor(file: io.FileIO, tensor: Tensor) -> None:
    """Writes the archive at the file's position.

    Args:
        file: Without a buffer of its own.
        tensor: On the CPU, contiguous.
    """
    import torch

    values = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    records = {
        "data.pkl": memoryview(_pickled(tensor)),
        "byteorder": memoryview(b"little"),
        f"data/{_STORAGE_KEY}": values,
        "version": memoryview(b"3\n"),
    }
    position, directory = 0, b""
    for name, data in records.items():
        full_name = f"{_FOLDER}/{name}".encode()
        padding = -(position + _LOCAL.size + len(full_name) + _LOCAL_64.size + 4)
        padding %= _ALIGNMENT_BYTES
        header = _local_header(full_name, len(data), padding)
        directory += _directory_entry(full_name, len(data), position)
        write_all(file, memoryview(header))
        write_all(file, data)
        position += len(header) + len(data)
    write_all(file, memoryview(directory + _end(len(records), len(directory), position)))


class _Storage:
    """Stands for the values, in the pickle."""


class _Rebuilt:
    """Pickled as a call of torch's that makes the tensor from its values."""

    def __init__(self, arguments: tuple[Any, ...]):
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        from torch._utils import _rebuild_tensor_v2

        return _rebuild_tensor_v2, self._arguments


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensor: Tensor):
        super().__init__(file, protocol=2)
        self._tensor = tensor

    def persistent_id(self, obj: Any) -> Any:
        """What stands for the values; None for what is pickled as usual."""
        import torch

        if not isinstance(obj, _Storage):
            return None
        name = str(self._tensor.dtype).removeprefix("torch.")
        storage = getattr(torch, STORAGES_BY_DTYPE[name])
        return "storage", storage, _STORAGE_KEY, "cpu", self._tensor.numel()


def _pickled(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    shape, stride = tuple(tensor.shape), tensor.stride()
    arguments = (_Storage(), 0, shape, stride, False, OrderedDict())
    _TensorPickler(file, tensor).dump(_Rebuilt(arguments))
    return file.getvalue()


# Of the zip format (PKWARE's APPNOTE.TXT, 4.3), always with 64-bit lengths.
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_64 = struct.Struct("<2H2Q")
_DIRECTORY = struct.Struct("<4s6H3L5H2L")
_DIRECTORY_64 = struct.Struct("<2H3Q")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_64_PLACE = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION = 45  # the first that knows zip64


def _local_header(name: bytes, length: int, padding: int) -> bytes:
    extra = _LOCAL_64.pack(1, 16, length, length)
    extra += struct.pack("<2H", 0x4246, padding) + b"Z" * padding
    fixed = _LOCAL.pack(
        b"PK\x03\x04", _VERSION, 0, 0, 0, 0, 0, _TOO_LARGE, _TOO_LARGE, len(name), len(extra)
    )
    return fixed + name + extra


def _directory_entry(name: bytes, length: int, position: int) -> bytes:
    extra = _DIRECTORY_64.pack(1, 24, length, length, position)
    sizes = (0, _TOO_LARGE, _TOO_LARGE)
    lengths = (len(name), len(extra), 0, 0, 0)
    versions = (_VERSION, _VERSION, 0, 0, 0, 0)
    return _DIRECTORY.pack(b"PK\x01\x02", *versions, *sizes, *lengths, 0, _TOO_LARGE) + name + extra


def _end(count: int, directory_bytes: int, position: int) -> bytes:
    end_64 = _END_64.pack(
        b"PK\x06\x06",
        _END_64.size - 12,
        _VERSION,
        _VERSION,
        0,
        0,
        count,
        count,
        directory_bytes,
        position,
    )
    place = _END_64_PLACE.pack(b"PK\x06\x07", 0, position + directory_bytes, 1)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, directory_bytes, _TOO_LARGE, 0)
    return end_64 + place + end
