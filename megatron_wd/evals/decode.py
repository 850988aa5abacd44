"""Many continuations at once: prompts of any length share a batch, finished rows make room for new ones.

What a sample draws depends on its own seed and on the position alone, so neither the batch that it was in
nor the order of the prompts matters for it (beyond the last bits of the logits, which depend on the
shapes that a matrix product has).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from megatron_wd.evals.cache import RowsCache

Finish = Literal["end", "stop", "length", "prompt_too_long"]

_REFILL_SHARE = 4  # new prompts join once a quarter of the rows is free
_COMPACT_SHARE = 8  # finished rows leave once they are an eighth of the batch
_SORTED_PROMPTS = 256  # prompts are sorted by length among so many, which bounds what is held


@dataclass(frozen=True)
class Settings:
    """How tokens are chosen.

    Attributes:
        temperature: Divides the logits before drawing; None takes the most likely token.
        repetition_penalty: Divides positive and multiplies negative logits of tokens that the prompt
            or the answer already has (arXiv 1909.05858); 1 changes nothing.
        max_tokens: Most tokens of prompt and answer together.
        max_new_tokens: Most tokens of the answer; None for as many as max_tokens leaves.
        stop: Texts that end an answer; they are cut off.
    """

    temperature: float | None = None
    repetition_penalty: float = 1.0
    max_tokens: int = 2048
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A text to continue once for every seed.

    Attributes:
        key: Comes back with every continuation.
        tokens: Of the prompt.
        seeds: One for every sample, 64 bits.
    """

    key: int
    tokens: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class Completion:
    """One continuation.

    Attributes:
        key: Of its prompt.
        sample: Which of the prompt's seeds.
        text: Without prompt, stop text and special tokens.
        num_tokens: That were generated, the one that ended it included.
        finish: Why it ended.
    """

    key: int
    sample: int
    text: str
    num_tokens: int
    finish: Finish


@dataclass
class _Row:
    prompt: Prompt
    sample: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.tokens)


@dataclass
class _Batch:
    """Rows under way. The newest token of a row is not in the cache yet."""

    rows: list[_Row]
    cache: RowsCache
    width: int  # columns of the cache
    mask: torch.Tensor  # [rows, width], what each row may see
    seen: torch.Tensor | None  # [rows, vocabulary], tokens that the penalty is for


class Decoder:
    """Continues prompts with a transformers model.

    Args:
        model: Causal language model, in evaluation mode.
        tokenizer: Its tokenizer.
        settings: How tokens are chosen.
        batch_size: Most continuations under way at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, batch_size: int) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.batch_size = batch_size
        self.end_tokens = end_tokens(model, tokenizer)
        longest = getattr(model.config, "max_position_embeddings", None) or settings.max_tokens
        self.max_tokens = min(settings.max_tokens, longest)
        # transformers 5.24 renames the argument.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._tail = max((len(s) for s in settings.stop), default=0) + 3

    @torch.inference_mode()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[Completion]:
        """Yields continuations in the order in which they end.

        Args:
            prompts: Read a few hundred at a time.
        """
        waiting = _by_length(prompts)
        batch: _Batch | None = None
        left: list[tuple[Prompt, int]] = []  # of a prompt whose samples did not all fit
        done = False
        while True:
            running = sum(row.finish is None for row in batch.rows) if batch else 0
            free = self.batch_size - running
            if not done and (not running or free * _REFILL_SHARE >= self.batch_size):
                joining: list[tuple[Prompt, int]] = left
                while len(joining) < free and not done:
                    prompt = next(waiting, None)
                    if prompt is None:
                        done = True
                    elif len(prompt.tokens) >= self.max_tokens:
                        for sample in range(len(prompt.seeds)):
                            yield Completion(prompt.key, sample, "", 0, "prompt_too_long")
                    else:
                        joining += [(prompt, sample) for sample in range(len(prompt.seeds))]
                joining, left = joining[:free], joining[free:]
                done = done and not left
                if joining:
                    batch, running = _drop_finished(batch), running + len(joining)
                    new = self._start(joining)
                    batch = new if batch is None else _join(batch, new)
            elif batch and (len(batch.rows) - running) * _COMPACT_SHARE >= len(batch.rows):
                batch = _drop_finished(batch)
            if not running or batch is None:
                if done:
                    return
                continue
            yield from self._ended(batch)
            if any(row.finish is None for row in batch.rows):
                self._step(batch)

    def _ended(self, batch: _Batch) -> Iterator[Completion]:
        """Marks the rows whose newest token ends them, and yields their texts."""
        for row in batch.rows:
            if row.finish is None:
                row.finish = self._finish(row)
                if row.finish:
                    yield self._completion(row)

    def _finish(self, row: _Row) -> Finish | None:
        if row.tokens[-1] in self.end_tokens:
            return "end"
        if self.settings.stop:
            tail = self.tokenizer.decode(row.tokens[-self._tail :], skip_special_tokens=True)
            if any(stop in tail for stop in self.settings.stop):
                return "stop"
        most = self.settings.max_new_tokens
        if row.length >= self.max_tokens or (most is not None and len(row.tokens) >= most):
            return "length"
        return None

    def _completion(self, row: _Row) -> Completion:
        # Both are decoded from the start: a tokenizer may drop the space before a text's first word.
        known = len(self.tokenizer.decode(row.prompt.tokens, skip_special_tokens=True))
        tokens = [*row.prompt.tokens, *row.tokens]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)[known:]
        for stop in self.settings.stop if row.finish == "stop" else ():
            text = text.partition(stop)[0]
        assert row.finish
        return Completion(row.prompt.key, row.sample, text, len(row.tokens), row.finish)

    def _start(self, joining: list[tuple[Prompt, int]]) -> _Batch:
        """Reads prompts, each once however many samples it has, and chooses their first tokens."""
        prompts = list({id(prompt): prompt for prompt, _ in joining}.values())
        place = {id(prompt): i for i, prompt in enumerate(prompts)}
        width = max(len(prompt.tokens) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
            mask[row, width - len(prompt.tokens) :] = True
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache = RowsCache()
        logits = self._forward(ids, mask, positions, cache)
        copies = torch.tensor([place[id(p)] for p, _ in joining], device=self.model.device)
        cache.select(copies, width)
        logits = logits[copies]
        seen = None
        if self.settings.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            # Masked columns name token 0, as the first seen token of their row does here.
            first = ids.gather(1, mask.int().argmax(dim=1, keepdim=True))
            seen.scatter_(1, torch.where(mask, ids, first)[copies], True)
        rows = [_Row(prompt, sample) for prompt, sample in joining]
        batch = _Batch(rows, cache, width, mask[copies], seen)
        self._choose(batch, logits)
        return batch

    def _step(self, batch: _Batch) -> None:
        """Adds one token to every row; finished rows go along until they are dropped."""
        device = self.model.device
        newest = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=device)
        positions = torch.tensor([[row.length - 1] for row in batch.rows], device=device)
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=True)
        batch.width += 1
        logits = self._forward(newest, batch.mask, positions, batch.cache)
        self._choose(batch, logits)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: RowsCache
    ) -> torch.Tensor:
        """Logits after the last column, [rows, vocabulary], in fp32."""
        outputs = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions.clamp(max=self.max_tokens - 1),  # of rows that have ended
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        return outputs.logits[:, -1].float()

    def _choose(self, batch: _Batch, logits: torch.Tensor) -> None:
        """Appends a token to every row, and notes it as seen."""
        settings = self.settings
        if batch.seen is not None:
            penalty = settings.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(batch.seen, penalised, logits)
        if settings.temperature is None:
            chosen = logits.argmax(dim=-1)
        else:
            draws = uniform(
                [row.prompt.seeds[row.sample] for row in batch.rows],
                [len(row.tokens) for row in batch.rows],
            )
            chosen = draw(logits / settings.temperature, draws)
        if batch.seen is not None:
            batch.seen.scatter_(1, chosen[:, None], True)
        for row, token in zip(batch.rows, chosen.tolist(), strict=True):
            row.tokens.append(token)


def draw(logits: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Draws one token per row by inverting the cumulative distribution.

    Args:
        logits: [rows, vocabulary].
        draws: [rows], uniform in [0, 1).

    Returns:
        [rows], the first token whose cumulative probability exceeds the row's draw.
    """
    # fp64: sums of 100,000 probabilities in fp32 would miss rare tokens.
    cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


def uniform(seeds: list[int], steps: list[int]) -> np.ndarray:
    """The `steps`-th number of SplitMix64 for each seed, uniform in [0, 1) with 53 bits."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64)
        state += (np.array(steps, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a text, after the model's generation settings and the tokenizer."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = ids if isinstance(ids, list) else [ids]
    return {int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None}


def _by_length(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Longest first within windows: similar lengths waste little, and what does not fit fails early."""
    source = iter(prompts)
    while window := list(islice(source, _SORTED_PROMPTS)):
        yield from sorted(window, key=lambda prompt: -len(prompt.tokens))


def _drop_finished(batch: _Batch | None) -> _Batch | None:
    """Keeps the rows that are under way, and the columns that one of them uses."""
    if batch is None:
        return None
    kept = [i for i, row in enumerate(batch.rows) if row.finish is None]
    if not kept:
        return None
    rows = [batch.rows[i] for i in kept]
    width = max(row.length for row in rows) - 1  # the newest token is not in the cache
    index = torch.tensor(kept, device=batch.mask.device)
    batch.cache.select(index, width)
    mask = batch.mask[index, batch.width - width :]
    seen = None if batch.seen is None else batch.seen[index]
    return _Batch(rows, batch.cache, width, mask, seen)


def _join(batch: _Batch, new: _Batch) -> _Batch:
    width = max(batch.width, new.width)
    batch.cache.append_rows(new.cache)
    pad = torch.nn.functional.pad
    mask = torch.cat([pad(b.mask, (width - b.width, 0)) for b in (batch, new)])
    seen = None
    if batch.seen is not None and new.seen is not None:
        seen = torch.cat([batch.seen, new.seen])
    return _Batch([*batch.rows, *new.rows], batch.cache, width, mask, seen)
