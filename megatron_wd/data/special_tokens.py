"""Which tokens of a tokenizer are special, which one ends a document, and texts that try to fool
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError

# Spellings in use for "end of document", tried only where no file of the tokenizer names one.
_USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|end▁of▁sentence|>")

_AWKWARD_TEXTS = (
    " leading and trailing ",
    "a  b   c    d        e",
    "\n\n\n\t\tif x:\r\n        y = 1\n",
    "1234567890 3.14159 1,000,000",
    "don't we'll I'M THEY'RE it's",
    "naïve café Ærøskøbing straße ﬁne Å Å",
    "中文字符，日本語テキスト、한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\u00a0\u3000x",
    "<0x0A> <0xE2> \u2581 \u2581\u2581x",
    "\ud7ff\ue000\U0010ffff",
)


def probes(spellings: list[str]) -> list[str]:
    """Short texts on which encoders tend to differ, the spellings of special tokens among them."""
    spelled = [f"one{s}two {s} three{s}" for s in spellings[:64]]
    return [*_AWKWARD_TEXTS, *spelled, *spellings[:64]]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no file.

    Raises:
        UserError: The file is there and does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object")
    return value


def named_tokens(folder: Path | None, settings: dict[str, Any]) -> dict[str, str]:
    """Spellings of the tokens that have a role (`eos_token`, `pad_token`, ...) in a folder's
    files.
    """
    found = {}
    sources = [settings]
    if folder is not None:
        sources.insert(0, read_json(folder / "special_tokens_map.json"))
    for source in sources:
        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
    return found


def find_eos(
    name: str,
    folder: Path | None,
    named: dict[str, str],
    ids: dict[str, int],
    special_ids: dict[str, int],
    vocab_size: int,
    override: int | None,
) -> int:
    """The id of the token that ends a document.

    Looked for in this order: `override`, the tokenizer's own files, generation_config.json and
    config.json of its folder, and a special token with one of the usual spellings.

    Args:
        name: The tokenizer, for messages.
        folder: Where its side files lie, if anywhere.
        named: Spellings by role, see `named_tokens`.
        ids: All ids by spelling.
        special_ids: Ids of special tokens by spelling.
        vocab_size: Number of ids.
        override: What the user asked for.

    Raises:
        UserError: None found, or what was named is not in the vocabulary.
    """
    if override is not None:
        if not 0 <= override < vocab_size:
            raise UserError(f"tokenizer {name}: eos_id {override} is not in 0..{vocab_size - 1}")
        return override
    spelling = named.get("eos_token")
    if spelling is not None:
        if spelling not in ids:
            raise UserError(
                f"tokenizer {name}: its eos_token {spelling!r} is not in the vocabulary; give "
                "eos_id"
            )
        return ids[spelling]
    for file in ("generation_config.json", "config.json") if folder is not None else ():
        value = read_json(Path(folder or "") / file).get("eos_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < vocab_size:
            return value
    usual = [s for s in _USUAL_EOS if s in special_ids]
    if len(usual) == 1:
        return special_ids[usual[0]]
    raise UserError(
        f"tokenizer {name}: it names no end-of-document token; add eos_token to "
        "tokenizer_config.json, "
        "or give its id as eos_id (--eos-id)"
    )
