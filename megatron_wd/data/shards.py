"""Puts the shards of a job array together into the corpus that one job would have written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wd.config import UserError
from megatron_wd.data.indexed_writer import SUFFIXES, IndexedWriter, check_absent, read_index_header
from megatron_wd.data.inputs import Shard
from megatron_wd.data.prepare import describe
from megatron_wd.data.special_tokens import read_json

# What all shards of a corpus must agree on.
_EQUAL = ("format", "tokenizer", "dtype", "inputs", "rules", "split")
_SUMMED = ("empty_documents", "skipped_documents", "replaced_documents")


def merge_shards(
    output: str,
    *,
    force: bool = False,
    remove: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Concatenates `OUTPUT-00000-of-N` ... in order to `OUTPUT`.

    Args:
        output: Prefix that was given to every `prepare_corpus(..., shard=...)`.
        force: Whether an existing corpus at `output` is overwritten.
        remove: Whether the shards are deleted once the corpus is complete.
        progress: Called with (shards done, shards in total).

    Returns:
        Content of OUTPUT.json.

    Raises:
        UserError: Shards are missing, damaged, or were made with different inputs, rules or
            tokenizers.
    """
    check_absent(output, force)
    prefixes = _find_shards(output)
    descriptions = [_read_shard(prefix) for prefix in prefixes]
    first = descriptions[0]
    for prefix, description in zip(prefixes[1:], descriptions[1:], strict=True):
        for key in _EQUAL:
            if description.get(key) != first.get(key):
                raise UserError(
                    f"shards do not belong together: {key} of {prefix} is {description.get(key)}, "
                    f"of {prefixes[0]} {first.get(key)}; prepare them again with the same arguments"
                )
    with IndexedWriter(output, np.dtype(first["dtype"])) as writer:
        for done, (prefix, description) in enumerate(zip(prefixes, descriptions, strict=True), 1):
            writer.add_corpus(prefix)
            if description["tokens"] and progress is not None:
                progress(done, len(prefixes))
        if not writer.tokens:
            raise UserError(f"no tokens: all {len(prefixes)} shards of {output} are empty")
        merged = {
            **describe(first["tokenizer"], writer, sum(d["text_bytes"] for d in descriptions)),
            **{key: sum(d[key] for d in descriptions) for key in _SUMMED},
            "inputs": first["inputs"],
            "rules": first["rules"],
            "shard": None,
            "split": first["split"],
        }
        writer.finish(merged)
    if remove:
        for prefix in prefixes:
            for suffix in reversed(SUFFIXES):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(prefix + suffix)
    return merged


def _find_shards(output: str) -> list[str]:
    """Prefixes of all shards, in order."""
    folder = Path(output).parent
    pattern = re.compile(re.escape(Path(output).name) + r"-(\d{5,})-of-(\d{5,})\.(bin|idx|json)")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    matches = [m for name in os.listdir(folder) if (m := pattern.fullmatch(name))]
    counts = sorted({int(m[2]) for m in matches})
    if not counts:
        raise UserError(
            f"no shards of {output} (such as {output}-00000-of-00004.json); prepare them with "
            "--shard I/N "
            "and the same --output"
        )
    if len(counts) > 1:
        raise UserError(
            f"shards of {output} come from splits into {' and '.join(map(str, counts))}; delete "
            "those that "
            "do not belong"
        )
    complete = {int(m[1]) for m in matches if m[3] == "json"}
    missing = [i for i in range(counts[0]) if i not in complete]
    if missing:
        names = ", ".join(f"{i}/{counts[0]}" for i in missing[:20])
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise UserError(f"shards of {output} are missing or incomplete: {names}{more}")
    return [Shard(i, counts[0]).prefix(output) for i in range(counts[0])]


def _read_shard(prefix: str) -> dict[str, Any]:
    """PREFIX.json, checked against the sizes of .bin and .idx."""
    description = read_json(Path(prefix + ".json"))
    try:
        dtype = np.dtype(description["dtype"])
        documents, tokens = description["documents"], description["tokens"]
        size = os.path.getsize(prefix + ".bin")
        in_index, _ = read_index_header(prefix + ".idx", dtype)
        index_size = os.path.getsize(prefix + ".idx")
    except KeyError as error:
        raise UserError(f"{prefix}.json: no {error} in it; not written by this tool") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; prepare this shard again") from None
    if size != tokens * dtype.itemsize or in_index != documents:
        raise UserError(f"{prefix}: .bin, .idx and .json do not fit together; prepare it again")
    if index_size != 34 + 12 * documents + 8 * (documents + 1):
        raise UserError(f"{prefix}.idx: cut off; prepare this shard again")
    return description
