"""Cuts inputs into chunks and reads the documents of a chunk.

`plan_chunks` runs in the main process and stays cheap: of a plain JSON Lines file it only looks for
line ends, and the worker that gets the chunk reads it. What can only be read from front to back
(gzip, Parquet, hub datasets) is read here and travels with the chunk. Chunks come in input order
and are of bounded size.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron_wd.config import UserError
from megatron_wd.data.inputs import HubDataset, InputFile, Shard

CHUNK_BYTES = 1 << 20
MAX_FILES_PER_CHUNK = 256


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents; exactly one of the four ways to hold them is set.

    Attributes:
        path: File that it comes from; name of the dataset for a hub dataset.
        progress_bytes: How far this brings us in the input, in bytes of the files on disk.
        byte_range: Whole lines of a plain JSON Lines file.
        lines: Whole lines that were read already.
        records: Values of the text column.
        files: Text files, one document each.
        first: Number of the first line (from 1) or record (from 0), for `lines` and `records`.
    """

    path: str
    progress_bytes: int
    byte_range: tuple[int, int] | None = None
    lines: bytes | None = None
    records: list[Any] | None = None
    files: tuple[str, ...] | None = None
    first: int = 0


def plan_chunks(
    inputs: list[InputFile] | HubDataset,
    text_key: str,
    shard: Shard,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """Yields the chunks of one shard.

    The bytes of all files together are cut into equal ranges, one per shard. A line of a plain JSON
    Lines file belongs to the range in which it starts, a Parquet row group likewise (row groups
    counted as equally large), a compressed or text file as a whole. So shards in order are exactly
    the unsharded input.
    """
    if isinstance(inputs, HubDataset):
        yield from _hub_chunks(inputs, text_key, shard, chunk_bytes)
        return
    low, high = shard.byte_range(sum(file.size for file in inputs))
    texts: list[InputFile] = []
    start = 0
    for file in inputs:
        begin, end = low - start, high - start  # the shard, relative to this file
        start += file.size
        mine = begin <= 0 < end
        if file.format == "text":
            if mine:
                texts.append(file)
                if _full(texts, chunk_bytes):
                    yield _text_chunk(texts)
                    texts = []
            continue
        if texts:
            yield _text_chunk(texts)
            texts = []
        if file.format == "parquet":
            yield from _parquet_chunks(file, text_key, begin, end, chunk_bytes)
        elif is_compressed(file.path):
            if mine:
                yield from _compressed_chunks(file, chunk_bytes)
        elif begin < file.size and end > 0:
            yield from _line_chunks(file, max(begin, 0), min(end, file.size), chunk_bytes)
    if texts:
        yield _text_chunk(texts)


def is_compressed(path: str) -> bool:
    """Whether a file can only be read from front to back."""
    return path.lower().endswith((".gz", ".zst"))


def next_line_start(stream: BinaryIO, at: int) -> int:
    """The first position >= `at` where a line starts."""
    if at <= 0:
        return 0
    stream.seek(at - 1)
    stream.readline()
    return stream.tell()


def _line_chunks(file: InputFile, begin: float, end: float, size: int) -> Iterator[Chunk]:
    with open(file.path, "rb") as stream:
        at = next_line_start(stream, int(begin))
        last = next_line_start(stream, int(end))
        while at < last:
            stop = min(last, next_line_start(stream, at + size))
            yield Chunk(file.path, stop - at, byte_range=(at, stop))
            at = stop


def open_compressed(path: str) -> tuple[BinaryIO, BinaryIO]:
    """Opens a .gz or .zst file: the uncompressed stream, and the raw one (for the position)."""
    raw = open(path, "rb")  # noqa: SIM115 - closed by the caller
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw  # type: ignore[arg-type]
    import pyarrow

    return pyarrow.CompressedInputStream(raw, "zstd"), raw  # type: ignore[return-value]


def _compressed_chunks(file: InputFile, size: int) -> Iterator[Chunk]:
    stream, raw = open_compressed(file.path)
    line, done, rest = 1, 0, b""
    try:
        with raw, stream:
            while block := stream.read(size):
                block = rest + block
                cut = block.rfind(b"\n") + 1
                block, rest = block[:cut], block[cut:]
                if block:
                    here = raw.tell()
                    yield Chunk(file.path, here - done, lines=block, first=line)
                    done = here
                    line += block.count(b"\n")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise UserError(f"{file.path}: damaged or cut off compressed file ({error})") from None
    if rest:
        yield Chunk(file.path, file.size - done, lines=rest, first=line)


def _parquet_chunks(
    file: InputFile, text_key: str, begin: float, end: float, size: int
) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if begin >= file.size > 0 or end <= 0:
        return
    try:
        table = pq.ParquetFile(file.path)
        if text_key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(f"{file.path}: no column {text_key!r} (--text-key); it has {names}")
        kind = table.schema_arrow.field(text_key).type
        if not (pa.types.is_large_string(kind) or pa.types.is_string(kind)
                or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):  # fmt: skip
            raise UserError(f"{file.path}: column {text_key!r} holds {kind}, not text")
        groups = table.num_row_groups
        row = 0
        for group in range(groups):
            rows = table.metadata.row_group(group).num_rows
            if begin <= file.size * group // groups < end:
                bytes_per_row = file.size / groups / max(rows, 1)
                batches = table.iter_batches(256, row_groups=[group], columns=[text_key])
                for batch in batches:
                    yield from _record_chunks(file.path, batch, row, bytes_per_row, size)
                    row += batch.num_rows
            else:
                row += rows
    except pa.ArrowException as error:
        raise UserError(f"{file.path}: damaged or not a Parquet file ({error})") from None


def _record_chunks(
    path: str, batch: Any, first: int, bytes_per_row: float, size: int
) -> Iterator[Chunk]:
    import pyarrow as pa

    # As bytes: whether they are valid UTF-8 is decided by us, with the row's number.
    values = batch.column(0).cast(pa.large_binary()).to_pylist()
    step = max(1, len(values) * size // max(batch.nbytes, size))
    for at in range(0, len(values), step):
        part = values[at : at + step]
        yield Chunk(path, int(bytes_per_row * len(part)), records=part, first=first + at)


def _full(files: list[InputFile], size: int) -> bool:
    return len(files) >= MAX_FILES_PER_CHUNK or sum(file.size for file in files) >= size


def _text_chunk(files: list[InputFile]) -> Chunk:
    paths = tuple(file.path for file in files)
    return Chunk(paths[0], sum(file.size for file in files), files=paths)


def _hub_chunks(source: HubDataset, text_key: str, shard: Shard, size: int) -> Iterator[Chunk]:
    rows = open_hub(source, shard)
    part: list[Any] = []
    held = index = 0
    for row in rows:
        if text_key not in row:
            raise UserError(
                f"dataset {source.name}: no field {text_key!r} (--text-key); it has "
                f"{', '.join(row)}"
            )
        part.append(row[text_key])
        held += len(row[text_key] or "")
        if held >= size:
            yield Chunk(source.name, held, records=part, first=index)
            index += len(part)
            part, held = [], 0
    if part:
        yield Chunk(source.name, held, records=part, first=index)


def open_hub(source: HubDataset, shard: Shard) -> Any:
    """Opens a dataset, streaming.

    Raises:
        UserError: It cannot be loaded, or has fewer files than shards.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    name = ":".join(filter(None, (source.name, source.config, source.split)))
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
    except Exception as error:  # the library raises many kinds, from many libraries
        text = str(error).strip().splitlines()
        raise UserError(
            f"dataset {name}: cannot be loaded ({text[0] if text else error!r})"
        ) from None
    if shard.count > rows.num_shards:
        raise UserError(
            f"dataset {name} is stored as {rows.num_shards} files, which cannot be split over "
            f"{shard.count} jobs; use --shard I/{rows.num_shards}"
        )
    return rows.shard(shard.count, shard.index) if shard.count > 1 else rows
