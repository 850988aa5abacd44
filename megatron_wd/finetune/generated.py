"""Generated tasks for small machines: questions of reasoning-gym with responses to learn from.

`arithmetic` has worked steps of ours over reasoning-gym's sums; the other tasks answer at once. A task is
a function of its seed: the same seed gives the same test set whatever the size of the training set.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.convert.output_folder import appears_when_done, check_target, files_of

MARK = "task.json"
_CHUNK = 2000  # questions generated at once
_PATIENCE = 5  # chunks without a single new question, after which a task counts as exhausted


@dataclass(frozen=True)
class GeneratedTask:
    """How a task is made.

    Attributes:
        generator: Name of reasoning-gym's dataset.
        write: From one of its entries to prompt, response and answer.
        about: One line for the command's help.
        options: What is set for the generator.
        keep: Which entries are taken; None for all.
    """

    generator: str
    write: Callable[[dict[str, Any]], tuple[str, str, str]]
    about: str
    options: dict[str, Any] = field(default_factory=dict)
    keep: Callable[[dict[str, Any]], bool] | None = None


def work_out_sum(expression: str) -> list[str]:
    """The steps of a chain of sums, from left to right.

    Args:
        expression: Such as `4 + 7 - 12`.

    Returns:
        Such as `["4 + 7 = 11", "11 - 12 = -1"]`.
    """
    first, *rest = expression.split()
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        steps.append(f"{total} {sign} {number} = {result}")
        total = result
    return steps


def _sum_with_steps(entry: dict[str, Any]) -> tuple[str, str, str]:
    expression, answer = entry["metadata"]["expression"], entry["answer"]
    steps = "\n".join(work_out_sum(expression))
    return f"What is {expression}?", f"{steps}\nThe answer is: {answer}", answer


def _stays_in_one_digit(entry: dict[str, Any]) -> bool:
    """Whether every total on the way is between 0 and 9: 110 facts, which a small model can learn."""
    steps = work_out_sum(entry["metadata"]["expression"])
    return all(0 <= int(step.rpartition(" = ")[2]) <= 9 for step in steps)


def _answer_at_once(entry: dict[str, Any]) -> tuple[str, str, str]:
    answer = entry["answer"]
    return entry["question"], f"The answer is: {answer}", answer


TASKS = {
    "arithmetic": GeneratedTask(
        "chain_sum",
        _sum_with_steps,
        "sums of 3 or 4 digits whose totals stay between 0 and 9, with worked steps",
        {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        _stays_in_one_digit,
    ),
    "signed_arithmetic": GeneratedTask(
        "chain_sum",
        _sum_with_steps,
        "the same with totals from -27 to 36",
        {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    ),
    "long_arithmetic": GeneratedTask(
        "chain_sum",
        _sum_with_steps,
        "sums of 3 to 6 numbers of up to 3 digits, with worked steps",
        {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 3},
    ),
    "gsm_symbolic": GeneratedTask(
        "gsm_symbolic", _answer_at_once, "word problems in the way of GSM8K"
    ),
    "gcd": GeneratedTask("gcd", _answer_at_once, "greatest common divisors"),
    "letter_counting": GeneratedTask("letter_counting", _answer_at_once, "letters in a sentence"),
    "spell_backward": GeneratedTask("spell_backward", _answer_at_once, "words spelled backwards"),
    "calendar": GeneratedTask("calendar_arithmetic", _answer_at_once, "days and dates"),
}


@dataclass(frozen=True)
class Problem:
    """One question."""

    prompt: str
    response: str
    answer: str


def generate(task: str, count: int, seed: int) -> Iterator[Problem]:
    """Yields `count` problems, no prompt twice.

    Raises:
        UserError: The task has not so many.
    """
    made = TASKS[task]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old code in packages that reasoning-gym uses
        import reasoning_gym
    seen: set[str] = set()
    barren = chunk = 0
    while len(seen) < count:
        # Each chunk has a seed of its own: entry i of a dataset depends on (seed + i) alone.
        first = seed * 10_000_019 + chunk * _CHUNK
        entries = reasoning_gym.create_dataset(
            made.generator, size=_CHUNK, seed=first, **made.options
        )
        before = len(seen)
        for index in range(_CHUNK):
            entry = entries[index]
            if made.keep is not None and not made.keep(entry):
                continue
            problem = Problem(*made.write(entry))
            if problem.prompt in seen:
                continue
            seen.add(problem.prompt)
            yield problem
            if len(seen) == count:
                return
        chunk += 1
        barren = barren + 1 if len(seen) == before else 0
        if barren == _PATIENCE:
            raise UserError(
                f"--task {task} has only about {len(seen):,} different questions, {count:,} are asked for; "
                "ask for fewer with --train and --test."
            )


def write_task(
    out: Path, task: str, num_train: int, num_test: int, seed: int, force: bool
) -> dict[str, Any]:
    """Writes `train.jsonl`, `test.jsonl` and `task.json` into a folder, all or nothing.

    Returns:
        The content of task.json.

    Raises:
        UserError: The folder is taken, or the task has too few questions.
    """
    check_target(out, force, MARK)
    problems = list(generate(task, num_test + num_train, seed))
    parts = {"test": problems[:num_test], "train": problems[num_test:]}
    shared = {p.prompt for p in parts["test"]} & {p.prompt for p in parts["train"]}
    assert not shared, f"{len(shared)} questions in both sets"
    record: dict[str, Any] = {
        "format": 1,
        "task": task,
        "seed": seed,
        "reasoning_gym": metadata.version("reasoning-gym"),
        "generator": TASKS[task].generator,
        "options": TASKS[task].options,
    }
    with appears_when_done(out, 0, force) as folder:
        for name, part in parts.items():
            lines = [
                json.dumps({"id": f"{task}-{name}-{index}", **vars(problem)}, ensure_ascii=False)
                for index, problem in enumerate(part)
            ]
            text = "".join(line + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
            digest = hashlib.sha256(text.encode()).hexdigest()
            record[name] = {"problems": len(part), "sha256": digest}
        record["files"] = files_of(folder, MARK)
        (folder / MARK).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record
