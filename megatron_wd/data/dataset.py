"""Training samples from token files, in an order that depends on nothing but the seed.

A sample is a window of `sequence_tokens + 1` tokens of the concatenated documents (inputs and, shifted by
one, targets), as in the weight-decay study's data code (blocks of 2,049 tokens). Which window is sample
number i is a pure function of (files, weights, seed, i): no index is built or cached, a run may be extended
without reshuffling what it has seen, and resuming needs one number, the samples consumed so far.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_wd.config import CorpusConfig, UserError

# A blend repeats a pattern of this many samples; weights are honoured to one in this many.
BLEND_PERIOD_SAMPLES = 65_536


class TokenFile:
    """A tokenized corpus: Megatron's PREFIX.bin and PREFIX.idx, read through a memory map.

    Args:
        prefix: path without the ending.

    Raises:
        UserError: a file is missing, is no Megatron index, or its size does not match its index.
    """

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import DType, _IndexReader

        bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise UserError(
                    f"data file {path} does not exist. Prepare it with `tools/prepare_data.py`, or "
                    "correct data.train/data.valid (a path is given without .bin or .idx)."
                )
        if bin_path.stat().st_size == 0:
            raise UserError(f"data file {bin_path} is empty. Prepare it again.")
        try:
            # Megatron validates by `assert` and struct errors; a damaged file is a user's matter here.
            index = _IndexReader(str(idx_path), multimodal=False)
            expected_tokens = int(np.sum(index.sequence_lengths, dtype=np.int64))
            dtype = index.dtype
        except Exception as error:
            raise UserError(
                f"{idx_path} is not a complete Megatron index ({type(error).__name__}: {error}). "
                "Prepare the data again."
            ) from error
        if not np.issubdtype(dtype, np.integer):
            raise UserError(f"{idx_path} says that its tokens are {np.dtype(dtype)}, not integers.")
        expected_bytes = expected_tokens * DType.size(dtype)
        if bin_path.stat().st_size != expected_bytes:
            raise UserError(
                f"{bin_path} has {bin_path.stat().st_size:,} bytes where its index {idx_path.name} "
                f"promises {expected_bytes:,}: it is truncated or belongs to another index. "
                "Prepare the data again."
            )
        self.prefix = prefix
        self.tokens = np.memmap(bin_path, dtype=dtype, mode="r")

    def manifest(self) -> dict | None:
        """What `tools/prepare_data.py` wrote beside the data; None for data from elsewhere."""
        path = Path(self.prefix + ".json")
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
            if isinstance(content["tokenizer"]["sha256"], str):
                return content
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise UserError(
            f"{path} is not what tools/prepare_data.py writes beside its data. Prepare the data again, or "
            "remove the file if the data come from elsewhere."
        )

    def num_samples(self, sequence_tokens: int) -> int:
        """Whole samples in the file; the last token has no successor to predict."""
        return (len(self.tokens) - 1) // sequence_tokens

    def window(self, index: int, sequence_tokens: int) -> np.ndarray:
        """Tokens of window `index` in file order: int64 [sequence_tokens + 1]."""
        start = index * sequence_tokens
        return self.tokens[start : start + sequence_tokens + 1].astype(np.int64)

    def id_range(self, most_tokens: int = 1 << 30) -> tuple[int, int]:
        """Smallest and largest token id among `most_tokens` tokens, in stretches over the whole file."""
        stretch = 1 << 22
        starts = range(0, len(self.tokens), stretch)
        every = max(1, len(self.tokens) // most_tokens)
        parts = [self.tokens[start : start + stretch] for start in starts[::every]]
        return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def permuted(index: int, size: int, key: str) -> int:
    """Position `index` of a pseudo-random permutation of range(size), without storing it.

    A balanced Feistel network over the next power of four, walked until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Constant memory, so a corpus of
    10**10 samples needs no index.

    Args:
        index: 0 <= index < size.
        size: length of the permutation.
        key: names the permutation.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}:{turn}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = (left << half_bits) | right
        if value < size:
            return value


@dataclass(frozen=True)
class _BlendPlan:
    """One period of a blend: which corpus gives each sample, and its how-manieth of the period."""

    corpus: np.ndarray  # [period]
    ordinal: np.ndarray  # [period]
    counts: np.ndarray  # [corpora]


def _plan_blend(corpora: list[CorpusConfig]) -> _BlendPlan:
    """Spreads the corpora evenly over a period, in proportion to their weights."""
    weights = np.array([c.weight for c in corpora], dtype=np.float64)
    weights /= weights.max()  # the sum of very large ones would be infinite
    share = weights / weights.sum() * BLEND_PERIOD_SAMPLES
    counts = np.floor(share).astype(np.int64)
    for i in np.argsort(counts - share, kind="stable")[: BLEND_PERIOD_SAMPLES - counts.sum()]:
        counts[i] += 1
    if (counts == 0).any():
        lost = corpora[int(np.argmin(counts))]
        raise UserError(
            f"data weight {lost.weight:g} of {lost.path} is below 1/{BLEND_PERIOD_SAMPLES} of the blend "
            "and would never be drawn. Raise it or leave the corpus out."
        )
    # Corpus i's k-th sample wants to stand at (k + 1/2) / counts[i] of the period.
    wanted = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    owner = np.repeat(np.arange(len(counts)), counts)
    ordinal = np.concatenate([np.arange(n) for n in counts])
    order = np.lexsort((owner, wanted))
    return _BlendPlan(owner[order], ordinal[order], counts)


class SampleStream:
    """An endless sequence of samples from a weighted blend of corpora.

    Each corpus is gone through in epochs; every epoch has its own order from (seed, corpus position in the
    list, epoch). Sample i does not depend on how many are drawn altogether.

    Args:
        corpora: paths and weights; not empty.
        sequence_tokens: inputs per sample; a sample has one token more.
        seed: names the order; None reads each corpus in file order.

    Raises:
        UserError: a file is unusable or shorter than one sample, or a weight vanishes.
    """

    def __init__(self, corpora: list[CorpusConfig], sequence_tokens: int, seed: int | None) -> None:
        self.sequence_tokens = sequence_tokens
        self.seed = seed
        self.files = [TokenFile(corpus.path) for corpus in corpora]
        for file in self.files:
            if file.num_samples(sequence_tokens) < 1:
                raise UserError(
                    f"data {file.prefix} has {len(file.tokens):,} tokens, less than one sample of "
                    f"train.sequence_tokens={sequence_tokens} (+1). Use a longer corpus or a shorter "
                    "sequence."
                )
        self._plan = _plan_blend(corpora) if len(corpora) > 1 else None

    def num_samples(self) -> int:
        """Samples in one pass over all corpora."""
        return sum(file.num_samples(self.sequence_tokens) for file in self.files)

    def locate(self, sample: int) -> tuple[int, int, int]:
        """(corpus, epoch, window) of a sample number."""
        corpus, ordinal = 0, sample
        if self._plan is not None:
            period, place = divmod(sample, BLEND_PERIOD_SAMPLES)
            corpus = int(self._plan.corpus[place])
            ordinal = period * int(self._plan.counts[corpus]) + int(self._plan.ordinal[place])
        size = self.files[corpus].num_samples(self.sequence_tokens)
        epoch, position = divmod(ordinal, size)
        if self.seed is not None:
            position = permuted(position, size, f"{self.seed}:{corpus}:{epoch}")
        return corpus, epoch, position

    def __getitem__(self, sample: int) -> np.ndarray:
        """Tokens of a sample: int64 [sequence_tokens + 1]."""
        corpus, _, window = self.locate(sample)
        return self.files[corpus].window(window, self.sequence_tokens)


def check_data(stream: SampleStream, vocab_size: int, tokenizer_sha256: str) -> None:
    """Stops where data and model or tokenizer do not belong together.

    Args:
        stream: opened corpora.
        vocab_size: ids that the model has.
        tokenizer_sha256: of the configured tokenizer.

    Raises:
        UserError: naming the corpus, both sides and the remedy.
    """
    for file in stream.files:
        manifest = file.manifest()
        if manifest is not None:
            made_with = manifest["tokenizer"]["sha256"]
            if made_with != tokenizer_sha256:
                raise UserError(
                    f"data {file.prefix} was prepared with another tokenizer (sha256 {made_with[:12]}) "
                    f"than data.tokenizer (sha256 {tokenizer_sha256[:12]}). Point data.tokenizer at the "
                    "one that was used, or prepare the data again."
                )
            continue  # the tokenizer's own size is checked against the model's
        smallest, largest = file.id_range()
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise UserError(
                f"data {file.prefix} holds token id {wrong}, but model.vocab_size={vocab_size} has ids "
                f"0 to {vocab_size - 1}. Set model.vocab_size to the tokenizer's size, or prepare the data "
                "with the tokenizer that data.tokenizer names."
            )
