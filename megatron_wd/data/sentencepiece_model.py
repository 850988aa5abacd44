"""Reads a SentencePiece .model and writes the same tokenizer as a Hugging Face tokenizer.json.

A .model file is one protocol buffer (sentencepiece_model.proto). The few fields we need are read
here directly, so that neither protobuf nor transformers has to be imported.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_wd.config import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
SPACE = "\u2581"  # SentencePiece writes a space as this character inside pieces


@dataclass
class Piece:
    """One vocabulary entry: its text, merge score (higher merges first) and type."""

    text: str = ""
    score: float = 0.0
    type: int = NORMAL


@dataclass
class SentencePieceModel:
    """What encoding depends on in a .model file; defaults are those of the protocol buffer."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def parse_model(data: bytes, source: str) -> SentencePieceModel:
    """Parses the bytes of a .model file.

    Args:
        data: The file's content.
        source: Where it comes from, for messages.

    Raises:
        UserError: It is no SentencePiece model, or of a type that we cannot encode.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                spec = dict(_fields(value))
                model.model_type = spec.get(3, UNIGRAM)
                model.whitespace_as_suffix = bool(spec.get(24, 0))
                model.byte_fallback = bool(spec.get(35, 0))
            elif number == 3:
                spec = dict(_fields(value))
                model.charsmap = bytes(spec.get(2, b""))
                model.add_dummy_prefix = bool(spec.get(3, 1))
                model.remove_extra_whitespaces = bool(spec.get(4, 1))
                model.escape_whitespaces = bool(spec.get(5, 1))
    except (ValueError, IndexError, struct.error, TypeError, AttributeError) as error:
        raise UserError(f"{source}: not a SentencePiece model ({error})") from None
    if not model.pieces:
        raise UserError(f"{source}: not a SentencePiece model (no pieces in it)")
    problem = _unsupported(model)
    if problem:
        raise UserError(
            f"{source}: a SentencePiece model {problem} is not supported; train one with "
            "model_type=bpe, or convert it to a Hugging Face tokenizer.json"
        )
    return model


def to_tokenizer_json(model: SentencePieceModel, *, match_control: bool) -> str:
    """The tokenizer.json that gives the same ids.

    Only pieces that SentencePiece itself may produce from text are made by merges, so that text
    that spells `</s>` or `<0x0A>` is not turned into those tokens by way of a merge.

    Args:
        model: A parsed model.
        match_control: Whether control pieces (`<s>`, `</s>`) are listed as special tokens.
            transformers needs the list to know its special tokens; for encoding a corpus they must
            stay text.
    """
    normalizers: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode("ascii")
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.remove_extra_whitespaces:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(model, match_control),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": next(p.text for p in model.pieces if p.type == UNKNOWN),
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": model.byte_fallback,
                "ignore_merges": False,
                "vocab": {piece.text: i for i, piece in enumerate(model.pieces)},
                "merges": _merges(model.pieces),
            },
        },
        ensure_ascii=False,
    )


def _unsupported(model: SentencePieceModel) -> str | None:
    if model.model_type != BPE:
        return f"of type {_MODEL_TYPES.get(model.model_type, model.model_type)}"
    if model.whitespace_as_suffix:
        return "with treat_whitespace_as_suffix"
    if not model.escape_whitespaces:
        return "with escape_whitespaces=false"
    if not any(piece.type == UNKNOWN for piece in model.pieces):
        return "without an unknown piece"
    return None


def _added_tokens(model: SentencePieceModel, match_control: bool) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = (CONTROL, UNKNOWN) if match_control else ()
    return [
        {"id": i, "content": piece.text, **flags, "special": piece.type != USER_DEFINED}
        for i, piece in enumerate(model.pieces)
        if piece.type in (*special, USER_DEFINED)
    ]


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Merge rules in order: SentencePiece merges the pair whose joined piece has the highest
    score.
    """
    mergeable = {
        piece.text: (piece.score, i) for i, piece in enumerate(pieces) if piece.type == NORMAL
    }
    found = []
    for text, (score, index) in mergeable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                found.append((-score, index, mergeable[left][1], mergeable[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _piece(data: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == 1:
            piece.text = value.decode("utf-8")
        elif number == 2:
            piece.score = struct.unpack("<f", value)[0]
        elif number == 3:
            piece.type = value
    return piece


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (field number, value) of a protocol buffer message; varints as int, all else as
    bytes.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire == 2:
                size, at = _varint(data, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise ValueError(f"wire type {wire} at byte {at}")
            if at + size > len(data):
                raise ValueError(f"cut off at byte {at}")
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise ValueError(f"bad varint at byte {at}")
