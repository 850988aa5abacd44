"""Writes a generated task, such as sums with worked steps, as training and test set (JSON Lines)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.config import UserError
from megatron_wd.config.cli import run_main
from megatron_wd.finetune.generated import TASKS, write_task


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    width = max(map(len, TASKS))
    listed = "\n".join(f"  {name:<{width}}  {task.about}" for name, task in TASKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"tasks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "out", metavar="OUT", help="folder for train.jsonl, test.jsonl and task.json"
    )
    parser.add_argument("--task", choices=TASKS, default="arithmetic", help="default: arithmetic")
    parser.add_argument("--train", type=int, default=8000, help="training problems (default: 8000)")
    parser.add_argument("--test", type=int, default=200, help="test problems (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--force", action="store_true", help="replace an earlier result in OUT")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    arguments = parser.parse_args(argv)
    for name in ("train", "test", "seed"):
        if getattr(arguments, name) < 0:
            raise UserError(f"--{name} is {getattr(arguments, name)}; it cannot be negative.")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    out = Path(arguments.out)
    record = write_task(
        out, arguments.task, arguments.train, arguments.test, arguments.seed, arguments.force
    )
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        train, test = record["train"]["problems"], record["test"]["problems"]
        print(
            f"{out}: {train:,} training and {test:,} test problems of {arguments.task}, none in both"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
