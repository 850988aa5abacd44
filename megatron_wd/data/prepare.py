"""Text to tokens: tokenizes a corpus to Megatron's .bin/.idx in several processes.

The main process plans chunks and writes results; workers read, parse and encode. A bounded window
of chunks is under way at any time, and results are written in the order of the chunks: memory does
not grow with the corpus and the output does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.data.documents import ReadCounts
from megatron_wd.data.encoding import Rules, cores, encode_all
from megatron_wd.data.indexed_writer import IndexedWriter, check_absent, token_dtype
from megatron_wd.data.inputs import (
    WHOLE,
    HubDataset,
    InputFile,
    Shard,
    describe_inputs,
    find_inputs,
)
from megatron_wd.data.readers import plan_chunks
from megatron_wd.data.sampling import sample_texts
from megatron_wd.data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
Progress = Callable[[int, int], None]


@dataclass
class Prepared:
    """What `prepare_corpus` did.

    Attributes:
        outputs: Content of each PREFIX.json, by prefix.
        fast_tokenizer: Whether the fast encoder was used.
        input_bytes: Bytes of the files that were read.
        seconds: Wall time.
    """

    outputs: dict[str, dict[str, Any]]
    fast_tokenizer: bool
    input_bytes: int
    seconds: float


def prepare_corpus(
    inputs: Sequence[str],
    output: str,
    tokenizer: str | Tokenizer,
    *,
    input_format: str = "auto",
    rules: Rules | None = None,
    shard: Shard | None = None,
    workers: int | None = None,
    fast: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenizes a corpus.

    Args:
        inputs: Files, folders, globs, or one `hf:NAME[:CONFIG][:SPLIT]`.
        output: Prefix of the files to write.
        tokenizer: A path for `load_tokenizer`, or a loaded tokenizer.
        input_format: "auto", "text", "jsonl" or "parquet".
        rules: What decides the content; the defaults of `Rules` if None.
        shard: Which part of the input to do; its files are named after it, see `merge_shards`.
        workers: Number of processes that encode; None is one per core.
        fast: Whether the fast encoder may be used where it agrees with the reference.
        force: Whether existing files are overwritten.
        progress: Called with (bytes done, bytes in total or 0 where unknown) of the input.
        say: Called with a line that the user should see; default prints to stderr.

    Returns:
        What was written.

    Raises:
        UserError: Bad input or tokenizer, existing output, full disk; nothing is left that looks
            complete.
    """
    began = time.perf_counter()
    say = say or (lambda line: print(line, file=sys.stderr))
    rules = rules or Rules()
    rules.check()
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    found = find_inputs(inputs, input_format)
    base = shard.prefix if shard else str
    prefixes = [base(output if split is None else f"{output}-{split}") for split in rules.splits]
    for prefix in prefixes:
        check_absent(prefix, force)
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    if fast:
        reason = tokenizer.use_fast(sample_texts(found, rules.text_key, shard or WHOLE))
        if reason is not None:
            say(f"the reference tokenizer is used, which is slower: {reason}")
    else:
        tokenizer.use_reference()
    outputs, done = _write(
        found, prefixes, tokenizer, rules, shard, workers or cores(), progress or (lambda *_: None)
    )
    return Prepared(outputs, tokenizer.is_fast, done, time.perf_counter() - began)


def _write(
    found: list[InputFile] | HubDataset,
    prefixes: list[str],
    tokenizer: Tokenizer,
    rules: Rules,
    shard: Shard | None,
    workers: int,
    progress: Progress,
) -> tuple[dict[str, dict[str, Any]], int]:
    """Encodes and writes; returns the content of the .json files and the bytes of input done."""
    part = shard or WHOLE
    total = sum(file.size for file in found) // part.count if isinstance(found, list) else 0
    dtype = token_dtype(tokenizer.vocab_size)
    counts = ReadCounts()
    text_bytes = [0] * len(prefixes)
    done = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        chunks = plan_chunks(found, rules.text_key, part)
        results = stack.enter_context(
            contextlib.closing(encode_all(chunks, tokenizer, rules, workers))
        )
        for chunk_bytes, encoded in results:
            for i, writer in enumerate(writers):
                writer.add(*encoded.parts[i])
                text_bytes[i] += encoded.text_bytes[i]
            counts.add(encoded.counts)
            done += chunk_bytes
            progress(done, total)
        if shard is None and not any(writer.tokens for writer in writers):
            raise UserError(
                f"no tokens: {counts.empty} empty and {counts.skipped} skipped documents, "
                "nothing else"
            )
        shared = {
            "empty_documents": counts.empty,
            "skipped_documents": counts.skipped,
            "replaced_documents": counts.replaced,
            "inputs": describe_inputs(found),
            "rules": vars(rules),
            "shard": vars(shard) if shard else None,
        }
        outputs = {}
        for split, writer, size in zip(rules.splits, writers, text_bytes, strict=True):
            own = describe(tokenizer.identity(), writer, size)
            outputs[writer.prefix] = {**own, **shared, "split": split}
            writer.finish(outputs[writer.prefix])
    return outputs, done


def describe(tokenizer: dict[str, Any], writer: IndexedWriter, text_bytes: int) -> dict[str, Any]:
    """The part of PREFIX.json that readers rely on."""
    return {
        "format": FORMAT,
        "tokenizer": tokenizer,
        "documents": writer.documents,
        "tokens": writer.tokens,
        "dtype": writer.dtype.name,
        "text_bytes": text_bytes,
    }
