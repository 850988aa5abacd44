"""Generated tasks: right steps, no question in both sets, the same from the same seed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wd.config import UserError
from megatron_wd.finetune.generated import TASKS, generate, work_out_sum, write_task

ROOT = Path(__file__).resolve().parent.parent


def problems(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_steps(prompt: str, response: str, answer: str) -> None:
    """Recomputes every step from the question."""
    match = re.fullmatch(r"What is ([\d+ -]+)\?", prompt)
    assert match is not None, prompt
    first, *rest = re.findall(r"[+-]|\d+", match.group(1))
    *steps, last = response.split("\n")
    total = int(first)
    assert len(steps) == len(rest) // 2
    for step, sign, number in zip(steps, rest[::2], rest[1::2], strict=True):
        result = total + int(sign + number)
        assert step == f"{total} {sign} {number} = {result}"
        total = result
    assert last == f"The answer is: {total}" and answer == str(total)


@pytest.mark.parametrize("task", ["arithmetic", "signed_arithmetic", "long_arithmetic"])
def test_steps_are_right_and_no_question_is_in_both_sets(task: str, tmp_path: Path) -> None:
    record = write_task(tmp_path / "out", task, 1500, 100, seed=3, force=False)
    train, test = (problems(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (1500, 100)
    asked = [p["prompt"] for p in train + test]
    assert len(set(asked)) == len(asked)
    assert len({p["id"] for p in train + test}) == len(asked)
    for problem in train + test:
        check_steps(problem["prompt"], problem["response"], problem["answer"])
    assert set(record["files"]) == {path.name for path in (tmp_path / "out").iterdir()}


def test_totals_of_the_easy_sums_have_one_digit() -> None:
    for problem in generate("arithmetic", 300, seed=2):
        assert re.fullmatch(r"(\d [+-] \d = \d\n)+The answer is: \d", problem.response)


def test_negative_totals() -> None:
    assert work_out_sum("4 - 9 - 1 + 12") == ["4 - 9 = -5", "-5 - 1 = -6", "-6 + 12 = 6"]


def test_a_seed_fixes_the_test_set_whatever_the_training_set(tmp_path: Path) -> None:
    for name, train, seed in (("a", 50, 1), ("b", 90, 1), ("c", 50, 2)):
        write_task(tmp_path / name, "arithmetic", train, 30, seed, force=False)
    test = {name: (tmp_path / name / "test.jsonl").read_bytes() for name in "abc"}
    assert test["a"] == test["b"] != test["c"]
    train = {name: (tmp_path / name / "train.jsonl").read_text() for name in "ab"}
    assert train["b"].startswith(train["a"])


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_has_answers(task: str) -> None:
    for problem in generate(task, 20, seed=5):
        assert problem.prompt and problem.answer.strip()
        assert problem.response.endswith(f"The answer is: {problem.answer}")


def test_too_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_wd.finetune import generated

    few = generated.GeneratedTask(
        "chain_sum",
        TASKS["arithmetic"].write,
        "",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
    monkeypatch.setitem(generated.TASKS, "few", few)
    with pytest.raises(
        UserError, match="has only about 200 different questions, 300 are asked for"
    ):
        list(generate("few", 300, seed=0))


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/make_tasks.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_command_line(tmp_path: Path) -> None:
    out = str(tmp_path / "sums")
    first = run_tool(out, "--train", "40", "--test", "10")
    assert first.returncode == 0, first.stderr
    assert "40 training and 10 test problems of arithmetic, none in both" in first.stdout
    again = run_tool(out, "--train", "40")
    assert again.returncode == 2 and "--force" in again.stderr
    forced = run_tool(out, "--train", "20", "--test", "5", "--force", "--json")
    assert forced.returncode == 0 and json.loads(forced.stdout)["train"]["problems"] == 20
    assert len(problems(tmp_path / "sums" / "test.jsonl")) == 5
    (tmp_path / "sums" / "notes.txt").write_text("mine")
    assert "notes.txt" in run_tool(out, "--force").stderr
    assert run_tool(out, "--train", "-1").returncode == 2
