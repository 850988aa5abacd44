"""Worker processes: chunks go in, encoded documents come out, in order and never many at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_wd.config import UserError
from megatron_wd.data.documents import ON_ERROR, ReadCounts, ReadRules, read_documents
from megatron_wd.data.indexed_writer import token_dtype
from megatron_wd.data.readers import Chunk
from megatron_wd.data.tokenizer import Tokenizer


@dataclass
class Rules:
    """What decides the content of the output, apart from inputs and tokenizer.

    Attributes:
        text_key: Field or column that holds the text.
        on_error: What to do at a bad document: "stop", "replace" or "skip".
        validation_fraction: Share of documents (0 to 1) that goes to PREFIX-valid instead, chosen
            by a hash of their text, so that equal documents fall on one side; 0 writes PREFIX
            alone.
    """

    text_key: str = "text"
    on_error: str = "stop"
    validation_fraction: float = 0.0

    def check(self) -> None:
        """Raises UserError where a field makes no sense."""
        if self.on_error not in ON_ERROR:
            raise UserError(f"--on-error {self.on_error}: expected one of {', '.join(ON_ERROR)}")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(
                f"--validation-fraction {self.validation_fraction}: expected at least 0, less "
                "than 1"
            )

    @property
    def splits(self) -> tuple[str | None, ...]:
        """Names of the outputs; None is the only one."""
        return ("train", "valid") if self.validation_fraction else (None,)


@dataclass
class Encoded:
    """Result of a chunk: for every split the tokens and the document lengths (int32), as bytes."""

    parts: list[tuple[bytes, bytes]]
    counts: ReadCounts
    text_bytes: list[int]


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, rules: Rules) -> Encoded:
    """Reads and encodes the documents of one chunk; each ends with exactly one EOS."""
    counts = ReadCounts()
    texts = read_documents(chunk, ReadRules(rules.text_key, rules.on_error), counts)
    eos = tokenizer.eos_id
    eos_is_special = eos in tokenizer.special_ids.values()
    dtype = token_dtype(tokenizer.vocab_size)
    ends = np.array([eos], dtype=np.int32)
    kept: list[list[np.ndarray]] = [[] for _ in rules.splits]
    lengths: list[list[int]] = [[] for _ in rules.splits]
    text_bytes = [0] * len(kept)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if not len(ids):  # a tokenizer that drops spaces leaves nothing of a blank document
            counts.empty += 1
            continue
        if eos_is_special and (ids == eos).any():
            raise UserError(
                f"{chunk.path}: the tokenizer makes its end-of-document token {eos} out of the "
                "text "
                f"{text[:60]!r}, which would cut the document in two; it cannot be used"
            )
        side = _side(text, rules.validation_fraction)
        kept[side] += (ids, ends)
        lengths[side].append(len(ids) + 1)
        text_bytes[side] += len(text) if text.isascii() else len(text.encode("utf-8"))
    parts = []
    for arrays, sizes in zip(kept, lengths, strict=True):
        tokens = np.concatenate(arrays).astype(dtype).tobytes() if arrays else b""
        parts.append((tokens, np.array(sizes, dtype=np.int32).tobytes()))
    return Encoded(parts, counts, text_bytes)


def _side(text: str, validation_fraction: float) -> int:
    """0 for training, 1 for validation: decided by the text alone."""
    if not validation_fraction:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int(int.from_bytes(digest, "little") < validation_fraction * 2**64)


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_all(
    chunks: Iterator[Chunk], tokenizer: Tokenizer, rules: Rules, workers: int
) -> Generator[tuple[int, Encoded]]:
    """Yields (progress in bytes, result) of every chunk, in order; memory does not grow with the
    corpus.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk.progress_bytes, encode_chunk(chunk, tokenizer, rules)
        return
    # Forked workers share the loaded tokenizer.
    method = "fork" if sys.platform == "linux" else "spawn"
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(tokenizer, rules, os.getpid()),
    )
    window: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            with warnings.catch_warnings():
                # Python warns of forking where other libraries have threads. The first submit
                # starts all workers, and these use no lock that such a thread could hold.
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
                future = executor.submit(_encode_in_worker, chunk)
            window.append((chunk.progress_bytes, future))
            if len(window) > 2 * workers + 2:
                size, future = window.popleft()
                yield size, future.result()
        for size, future in window:
            yield size, future.result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_worker_state: tuple[Tokenizer, Rules] | None = None  # set once per worker process


def _start_worker(tokenizer: Tokenizer, rules: Rules, parent: int) -> None:
    global _worker_state
    _worker_state = (tokenizer, rules)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is parallel enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the main process's to handle
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """Ends this worker when the main process was killed; its queue would be waited for forever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _worker_state is not None
    return encode_chunk(chunk, *_worker_state)
