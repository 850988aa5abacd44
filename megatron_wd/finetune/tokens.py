"""From prompts and responses to token ids and labels, with every example accounted for."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_wd.config import UserError
from megatron_wd.finetune.schema import CONTENT, FinetuneConfig
from megatron_wd.finetune.task import RowCounts, count_warnings, read_examples

IGNORED = -100  # the label of a token that no loss is computed for, in torch and transformers
_BATCH = 1000  # examples tokenized at once


@dataclass
class DataReport:
    """What the examples of a run are.

    Attributes:
        rows: Rows read from the source.
        kept: Rows that the task's filter left.
        samples: Examples that are trained on.
        empty: Examples without prompt or response, left out.
        over_long: Examples longer than the cutoff.
        cut: Those of them that were shortened.
        dropped: Those of them that were left out, because asked for or because no response was left.
        longest_tokens: Length of the longest example before any cut.
        tokens: All tokens that are trained on.
        response_tokens: Those that have a loss.
        sha256: Over all token ids and labels.
    """

    rows: int = 0
    kept: int = 0
    samples: int = 0
    empty: int = 0
    over_long: int = 0
    cut: int = 0
    dropped: int = 0
    longest_tokens: int = 0
    tokens: int = 0
    response_tokens: int = 0
    sha256: str = ""


@dataclass
class Samples:
    """Token ids and labels, one array for each example."""

    input_ids: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)


class Encoder:
    """Encodes a prompt and its response apart, so that training sees the prompt that sampling gives.

    (Encoded together, tokens may merge over the border.) Whether a BOS comes first is the tokenizer's
    own affair. Text that spells a special token stays text.

    Args:
        tokenizer: Of transformers, with an end-of-text token.
        template: Text around a prompt.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = template.split(CONTENT)
        first = tokenizer("a").input_ids[:1]
        begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
        self._prefix = first if begins else []

    def encode(self, prompts: list[str], responses: list[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each prompt in its template, and of each response with its end."""
        around = [self._before + prompt + self._after for prompt in prompts]
        end = [self._tokenizer.eos_token_id]
        pairs = zip(self._ids(around), self._ids(responses), strict=True)
        return [(self._prefix + prompt, response + end) for prompt, response in pairs]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self._tokenizer(texts, return_attention_mask=False, **options)["input_ids"]


def prepare_samples(
    config: FinetuneConfig, tokenizer: Any
) -> tuple[Samples, DataReport, list[str]]:
    """Reads, renders and encodes the examples of a run.

    Returns:
        The samples in the order of the source, what became of the rows, and warnings.

    Raises:
        UserError: Data, templates or lengths do not fit the config.
    """
    counts, report, samples = RowCounts(), DataReport(), Samples()
    encoder = Encoder(tokenizer, config.template)
    refused: dict[str, list[str]] = {"empty": [], "over_long": []}
    examples = read_examples(config.task, counts)
    while batch := list(itertools.islice(examples, _BATCH)):
        full = []
        for example in batch:
            if example.prompt.strip() and example.response.strip():
                full.append(example)
            else:
                report.empty += 1
                refused["empty"].append(example.place)
        encoded = (
            encoder.encode([e.prompt for e in full], [e.response for e in full]) if full else []
        )
        for example, (prompt, response) in zip(full, encoded, strict=True):
            if _add(prompt, response, config, report, samples):
                refused["over_long"].append(example.place)
    report.rows, report.kept = counts.rows, counts.kept
    _refuse(config, report, refused)
    _finish(samples, report)
    return samples, report, count_warnings(config.task, counts)


def _add(
    prompt: list[int],
    response: list[int],
    config: FinetuneConfig,
    report: DataReport,
    samples: Samples,
) -> bool:
    """Adds one example, or what the cutoff leaves of it; returns whether it was too long."""
    length, limit = len(prompt) + len(response), config.cutoff_tokens
    report.longest_tokens = max(report.longest_tokens, length)
    too_long = length > limit
    report.over_long += too_long
    if too_long and (config.over_long != "cut" or len(prompt) >= limit):
        report.dropped += 1
        return True
    report.cut += too_long
    ids = np.asarray(prompt + response, dtype=np.int32)[:limit]
    labels = ids.copy()
    labels[: len(prompt)] = IGNORED
    samples.input_ids.append(ids)
    samples.labels.append(labels)
    return too_long


def _refuse(config: FinetuneConfig, report: DataReport, refused: dict[str, list[str]]) -> None:
    problems = []
    if report.empty and config.empty == "refuse":
        problems.append(
            f"task {config.task.name}: {report.empty:,} of {report.kept:,} examples have an empty prompt "
            f"or response ({_some(refused['empty'])}). Mend the data, or set empty=drop."
        )
    if report.over_long and config.over_long == "refuse":
        problems.append(
            f"task {config.task.name}: {report.over_long:,} of {report.kept:,} examples are longer than "
            f"cutoff_tokens {config.cutoff_tokens} (the longest has {report.longest_tokens:,}; "
            f"{_some(refused['over_long'])}). Set over_long=drop or over_long=cut, or raise cutoff_tokens."
        )
    if problems:
        raise UserError("\n".join(problems))


def _some(places: list[str]) -> str:
    return ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")


def _finish(samples: Samples, report: DataReport) -> None:
    digest = hashlib.sha256()
    for ids, labels in zip(samples.input_ids, samples.labels, strict=True):
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes() + labels.tobytes())
        report.tokens += len(ids)
        report.response_tokens += int((labels != IGNORED).sum())
    report.samples = len(samples.input_ids)
    report.sha256 = digest.hexdigest()
    if not report.samples:
        counted = ", ".join(f"{k} {v:,}" for k, v in asdict(report).items() if k != "sha256")
        raise UserError(f"no example is left to train on: {counted}.")


def as_dataset(samples: Samples) -> Any:
    """Puts samples into a `datasets.Dataset` in memory, as the trainer wants them."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    batches = []
    for start in range(0, len(samples.input_ids), _BATCH):
        columns = {}
        for name in ("input_ids", "labels"):
            part = getattr(samples, name)[start : start + _BATCH]
            offsets = np.cumsum([0, *map(len, part)], dtype=np.int32)
            columns[name] = pyarrow.ListArray.from_arrays(offsets, np.concatenate(part))
        batches.append(pyarrow.RecordBatch.from_pydict(columns))
    return Dataset(InMemoryTable(pyarrow.Table.from_batches(batches)))
