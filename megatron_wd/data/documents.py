"""Reads the documents of a chunk, and says exactly where a bad one lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.data.readers import Chunk

ON_ERROR = ("stop", "replace", "skip")
_BOM = b"\xef\xbb\xbf"


class _BadDocument(Exception):
    """A document that cannot be read: what is wrong, and whether replacing characters would
    help.
    """

    def __init__(self, problem: str, replaceable: bool = False):
        super().__init__(problem)
        self.replaceable = replaceable


@dataclass
class ReadRules:
    """How documents are read.

    Attributes:
        text_key: Field of JSON Lines that holds the text.
        on_error: "stop" at a bad document, "replace" invalid characters by U+FFFD, or "skip" it.
    """

    text_key: str = "text"
    on_error: str = "stop"


@dataclass
class ReadCounts:
    """What happened to documents that did not simply pass."""

    empty: int = 0
    skipped: int = 0
    replaced: int = 0

    def add(self, other: ReadCounts) -> None:
        """Adds another chunk's counts."""
        self.empty += other.empty
        self.skipped += other.skipped
        self.replaced += other.replaced


def read_documents(chunk: Chunk, rules: ReadRules, counts: ReadCounts) -> list[str]:
    """The non-empty documents of a chunk, in order.

    Raises:
        UserError: A bad document, with its file and line, unless `rules` say otherwise.
    """
    texts = []
    for place, raw in _raw_documents(chunk):
        try:
            text = _text_of(chunk, raw, rules, counts)
        except _BadDocument as error:
            if rules.on_error != "skip":
                raise UserError(_message(chunk, place, error)) from None
            counts.skipped += 1
            continue
        if text is None:  # a blank line is no document
            continue
        if text:
            texts.append(text)
        else:
            counts.empty += 1
    return texts


def _raw_documents(chunk: Chunk) -> Iterator[tuple[Any, Any]]:
    """Yields (place, raw document); places are what `_message` turns into words."""
    if chunk.files is not None:
        for path in chunk.files:
            try:
                with open(path, "rb") as stream:
                    yield path, stream.read()
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    elif chunk.records is not None:
        yield from enumerate(chunk.records, start=chunk.first)
    elif chunk.lines is not None:
        yield from enumerate(chunk.lines.split(b"\n"), start=chunk.first)
    else:
        begin, end = chunk.byte_range or (0, 0)
        with open(chunk.path, "rb") as stream:
            stream.seek(begin)
            data = stream.read(end - begin)
        at = begin
        for line in data.split(b"\n"):
            yield at, line
            at += len(line) + 1


def _text_of(chunk: Chunk, raw: Any, rules: ReadRules, counts: ReadCounts) -> str | None:
    if chunk.files is not None:
        return _decode(raw.removeprefix(_BOM), rules, counts)
    if chunk.records is not None:
        if raw is None:
            return ""
        if isinstance(raw, bytes):
            return _decode(raw, rules, counts)
        if not isinstance(raw, str):
            raise _BadDocument(f"{rules.text_key!r} holds {type(raw).__name__}, not text")
        return _without_surrogates(raw, rules, counts)
    return _json_text(raw, rules, counts)


def _json_text(line: bytes, rules: ReadRules, counts: ReadCounts) -> str | None:
    line = line.removeprefix(_BOM)
    if not line or line.isspace():
        return None
    try:
        record = json.loads(_decode(line, rules, counts))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _BadDocument(f"not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise _BadDocument(f"expected a JSON object, found {type(record).__name__}")
    if rules.text_key not in record:
        names = ", ".join(list(record)[:20]) or "none"
        raise _BadDocument(f"no field {rules.text_key!r} (--text-key); its fields: {names}")
    text = record[rules.text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _BadDocument(f"field {rules.text_key!r} holds {type(text).__name__}, not text")
    # JSON can spell half a surrogate pair ("\ud83d"), which is no character.
    return _without_surrogates(text, rules, counts) if b"\\u" in line else text


def _decode(raw: bytes, rules: ReadRules, counts: ReadCounts) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if rules.on_error == "replace":
            counts.replaced += 1
            return raw.decode("utf-8", errors="replace")
        raise _BadDocument(
            f"invalid UTF-8 at byte {error.start} of the document ({error.reason})", True
        ) from None


def _without_surrogates(text: str, rules: ReadRules, counts: ReadCounts) -> str:
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if rules.on_error == "replace":
            counts.replaced += 1
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        raise _BadDocument(
            f"half a surrogate pair at character {error.start} of the text, which is no Unicode "
            "text",
            True,
        ) from None


def _message(chunk: Chunk, place: Any, error: _BadDocument) -> str:
    if chunk.files is not None:
        where = str(place)
    elif chunk.records is not None:
        where = f"{chunk.path}: row {place}"
    elif chunk.lines is not None:
        where = f"{chunk.path}:{place}"
    else:
        where = f"{chunk.path}:{_line_number(chunk.path, place)} (byte {place})"
    remedy = "--on-error replace or skip" if error.replaceable else "--on-error skip"
    return f"{where}: {error}; mend it, or use {remedy}"


def _line_number(path: str, offset: int) -> int:
    """Number of the line that starts at `offset`; only counted when something is wrong."""
    count = 1
    with open(path, "rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 24))):
            count += block.count(b"\n")
            offset -= len(block)
    return count
