"""Writes a torch.distributed.checkpoint folder as Megatron Core does, one tensor at a time.

One file, `__0_0.distcp`, holds every tensor whole, as a `torch.save` archive; `.metadata` says where.
Megatron's `dist_checkpointing.load` gives each rank of any layout its part of them.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wd.convert.archive_writer import write_tensor
from megatron_wd.convert.dcp import METADATA
from megatron_wd.convert.output_folder import write_all

if TYPE_CHECKING:
    from torch import Tensor

_FILE = "__0_0.distcp"
_MAIN_HINT = "torch_dist"


class TensorWriter:
    """Writes tensors in any order; use it as a context manager, which completes the folder."""

    def __init__(self, folder: Path):
        """Starts the file.

        Args:
            folder: An existing folder.
        """
        from torch.distributed.checkpoint.metadata import Metadata

        self._folder = folder
        self._file = (folder / _FILE).open("wb", buffering=0)
        self._metadata = Metadata({}, storage_data={}, version="1.0.0")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._file.close()
        if kind is None:
            (self._folder / METADATA).write_bytes(pickle.dumps(self._metadata))
            # What Megatron Core recognises its checkpoints by.
            backend = {"sharded_backend": _MAIN_HINT, "sharded_backend_version": 1}
            (self._folder / "metadata.json").write_text(json.dumps(backend))

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        values = tensor.detach().contiguous()
        origin = [0] * values.dim()
        self._store(MetadataIndex(name, origin), values)
        chunk = ChunkStorageMetadata(_size(origin), values.shape)
        properties = TensorProperties.create_from_tensor(values)
        self._metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, values.shape, [chunk]
        )

    def write_objects(self, names: Iterable[str], value: Any) -> None:
        """Writes an object that is no tensor, under several names; Megatron wraps it in a list."""
        import torch
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        data = io.BytesIO()
        torch.save([value], data)
        for name in names:
            # An object is divided over ranks too: this is part 0 of 1.
            key = f"{name}/shard_0_1"
            self._place(MetadataIndex(key), data.getvalue())
            self._metadata.state_dict_metadata[key] = BytesStorageMetadata()

    def _store(self, index: Any, values: Tensor) -> None:
        start = self._file.tell()
        write_tensor(self._file, values)
        self._record(index, start)

    def _place(self, index: Any, data: bytes) -> None:
        start = self._file.tell()
        write_all(self._file, memoryview(data))
        self._record(index, start)

    def _record(self, index: Any, start: int) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        place = _StorageInfo(_FILE, start, self._file.tell() - start)
        self._metadata.storage_data[index] = place


def _size(values: list[int]) -> Any:
    import torch

    return torch.Size(values)
