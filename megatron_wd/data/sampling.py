"""A little of the user's own text from places all over the input, for checking the fast encoder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron_wd.config import UserError
from megatron_wd.data.documents import ReadCounts, ReadRules, read_documents
from megatron_wd.data.inputs import HubDataset, InputFile, Shard
from megatron_wd.data.readers import Chunk, is_compressed, next_line_start, plan_chunks

_PLACES = 8
_BYTES_PER_PLACE = 1 << 14
_MAX_TEXTS = 256


def sample_texts(inputs: list[InputFile] | HubDataset, text_key: str, shard: Shard) -> list[str]:
    """Texts of at most 16 kB from eight places; unreadable ones are left for the real pass to
    report.
    """
    rules = ReadRules(text_key, on_error="skip")
    texts: list[str] = []
    for chunk in _sample_chunks(inputs, text_key, shard):
        try:
            found = read_documents(chunk, rules, ReadCounts())
        except (UserError, OSError):
            continue
        taken = 0
        for text in found:
            texts.append(text[: _BYTES_PER_PLACE - taken])
            taken += len(texts[-1])
            if taken >= _BYTES_PER_PLACE:
                break
    return texts[:_MAX_TEXTS]


def _sample_chunks(
    inputs: list[InputFile] | HubDataset, text_key: str, shard: Shard
) -> Iterator[Chunk]:
    if isinstance(inputs, HubDataset):
        yield from itertools.islice(plan_chunks(inputs, text_key, shard, _BYTES_PER_PLACE), 1)
        return
    total = sum(file.size for file in inputs)
    for place in range(_PLACES):
        at = total * place // _PLACES
        for file in inputs:
            if at < file.size:
                yield from _chunk_at(file, at, text_key)
                break
            at -= file.size


def _chunk_at(file: InputFile, at: int, text_key: str) -> Iterator[Chunk]:
    if file.format == "text":
        yield Chunk(file.path, 0, files=(file.path,))
    elif file.format == "jsonl" and not is_compressed(file.path):
        with open(file.path, "rb") as stream:
            begin = next_line_start(stream, at)
            end = next_line_start(stream, begin + _BYTES_PER_PLACE)
        yield Chunk(file.path, 0, byte_range=(begin, min(end, file.size)))
    else:
        # From the front only: a compressed file cannot be entered in the middle.
        alone = plan_chunks([file], text_key, Shard(0, 1), _BYTES_PER_PLACE)
        yield from itertools.islice(alone, 1)
