"""Writes Megatron's .bin/.idx, byte for byte as Megatron Core's IndexedDatasetBuilder does, and
PREFIX.json.

Why not that builder: it needs torch imported, keeps every length in a Python list (memory grows
with the corpus), and leaves files under their final names when it is interrupted. Here everything
is written to `*.partial` names; at the end .bin, .idx and, last of all, .json get their names.
Format (little endian): .bin is the tokens of all documents; .idx is the magic, version, type code,
counts, then lengths (int32), byte offsets (int64) and document boundaries (int64).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_wd.config import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {"int32": 4, "uint16": 8}
_BLOCK = 1 << 20  # entries copied at a time while the index is made
SUFFIXES = (".bin", ".idx", ".json")


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of a token on disk, chosen as Megatron does: 2 bytes below 65,500 ids, else 4."""
    return np.dtype("uint16" if vocab_size < 65500 else "int32")


def check_absent(prefix: str, force: bool) -> None:
    """Refuses to overwrite a corpus.

    Raises:
        UserError: One of the files exists and `force` is not set.
    """
    there = [prefix + suffix for suffix in SUFFIXES if os.path.exists(prefix + suffix)]
    if there and not force:
        raise UserError(f"{', '.join(there)} exists already; use --force to overwrite it")


class IndexedWriter:
    """Writes one corpus; use it as a context manager. Leaving without `finish` removes what was
    written.

    Args:
        prefix: Path without suffix.
        dtype: Type of a token on disk.

    Raises:
        UserError: The folder cannot be written, the disk is full, or another run writes there.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = dtype
        self.documents = 0
        self.tokens = 0
        self._bin_path = prefix + ".bin.partial"
        self._lengths_path = prefix + ".lengths.partial"
        self._finished = False
        with _explained(prefix):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = _open_locked(self._bin_path)
            self._lengths = open(self._lengths_path, "wb")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if not self._finished:
            for path in (self._lengths_path, self.prefix + ".idx.partial", self._bin_path):
                with contextlib.suppress(OSError):
                    os.remove(path)
        for stream in (self._lengths, self._bin):
            with contextlib.suppress(OSError):
                stream.close()

    def add(self, tokens: bytes | memoryview, lengths: bytes) -> None:
        """Appends documents.

        Args:
            tokens: Their tokens one after the other, as `dtype`.
            lengths: Tokens per document, as int32.
        """
        with _explained(self.prefix):
            self._bin.write(tokens)
            self._lengths.write(lengths)
        self.tokens += len(tokens) // self.dtype.itemsize
        self.documents += len(lengths) // 4

    def add_corpus(self, prefix: str) -> None:
        """Appends another corpus of the same token type, in blocks."""
        lengths_count, offset = read_index_header(prefix + ".idx", self.dtype)
        with (
            _explained(self.prefix),
            open(prefix + ".bin", "rb") as tokens,
            open(prefix + ".idx", "rb") as index,
        ):
            shutil.copyfileobj(tokens, self._bin, 1 << 24)
            self.tokens += tokens.tell() // self.dtype.itemsize
            index.seek(offset)
            left = lengths_count * 4
            while left:
                block = index.read(min(left, 1 << 24))
                if not block:
                    raise UserError(f"{prefix}.idx: cut off")
                self._lengths.write(block)
                left -= len(block)
        self.documents += lengths_count

    def finish(self, description: dict[str, Any]) -> None:
        """Writes the index, gives the files their names and writes PREFIX.json last.

        Args:
            description: Content of PREFIX.json.
        """
        index_path = self.prefix + ".idx.partial"
        with _explained(self.prefix):
            self._lengths.close()
            with open(index_path, "wb") as index:
                self._write_index(index)
                _sync(index)
            _sync(self._bin)
            json_path = self.prefix + ".json.partial"
            with open(json_path, "w", encoding="utf-8") as stream:
                stream.write(json.dumps(description, indent=2) + "\n")
                _sync(stream)
            # What exists under these names (with --force) must stop looking complete first.
            for suffix in (".json", ".idx"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.prefix + suffix)
            os.replace(self._bin_path, self.prefix + ".bin")
            os.replace(index_path, self.prefix + ".idx")
            os.replace(json_path, self.prefix + ".json")
            self._finished = True
            os.remove(self._lengths_path)

    def _write_index(self, index: BinaryIO) -> None:
        index.write(_MAGIC + struct.pack("<QB", 1, _CODES[self.dtype.name]))
        index.write(struct.pack("<QQ", self.documents, self.documents + 1))
        for lengths in self._length_blocks():
            index.write(lengths.astype("<i4").tobytes())
        offset = 0
        for lengths in self._length_blocks():
            ends = offset + np.cumsum(lengths.astype(np.int64) * self.dtype.itemsize)
            index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, self.documents + 1, _BLOCK):
            stop = min(start + _BLOCK, self.documents + 1)
            index.write(np.arange(start, stop, dtype="<i8").tobytes())

    def _length_blocks(self) -> Iterator[np.ndarray]:
        with open(self._lengths_path, "rb") as stream:
            while block := stream.read(4 * _BLOCK):
                yield np.frombuffer(block, dtype=np.int32)


def read_index_header(path: str, dtype: np.dtype | None = None) -> tuple[int, int]:
    """Number of documents and where their lengths start, for an .idx with one sequence per
    document.

    Raises:
        UserError: Not such a file, or of another token type than `dtype`.
    """
    with open(path, "rb") as stream:
        header = stream.read(34)
    if len(header) < 34 or header[:9] != _MAGIC:
        raise UserError(f"{path}: not a Megatron index")
    code, sequences, boundaries = struct.unpack("<BQQ", header[17:34])
    if dtype is not None and code != _CODES[dtype.name]:
        raise UserError(f"{path}: its tokens are not stored as {dtype.name}")
    if boundaries != sequences + 1:
        raise UserError(
            f"{path}: {sequences} sequences and {boundaries - 1} documents, expected equal"
        )
    return sequences, 34


def _open_locked(path: str) -> BinaryIO:
    """Opens for writing, unless another process is writing the same file."""
    stream = open(path, "ab")  # noqa: SIM115 - "wb" would empty the file of the process that has the lock
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise UserError(f"{path}: another run is writing this corpus right now") from None
    except (ImportError, OSError):
        pass  # some network file systems have no locks
    stream.truncate(0)
    return stream


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@contextlib.contextmanager
def _explained(prefix: str) -> Iterator[None]:
    """Turns what the file system refuses into one clear message."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left while writing {prefix}: the incomplete files are removed; free "
                "some "
                "space or choose another --output"
            ) from None
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {error.filename or prefix}: {reason}") from None
