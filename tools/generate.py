"""Writes text with a language model from a Hugging Face folder, such as an export of convert.py."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.config import UserError
from megatron_wd.config.cli import run_main


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="HF_FOLDER", help="model and tokenizer")
    parser.add_argument("--prompt", required=True, help="text to go on from; - reads it from stdin")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.8, help="default: 0.8")
    parser.add_argument("--top-p", type=float, default=0.95, help="default: 0.95")
    parser.add_argument(
        "--greedy", action="store_true", help="always the most likely token, nothing drawn"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--num-samples", type=int, default=1, help="texts to write (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    check(arguments)
    return arguments


def check(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {arguments.max_new_tokens}; it must be at least 1.")
    if arguments.num_samples < 1:
        raise UserError(f"--num-samples is {arguments.num_samples}; it must be at least 1.")
    if arguments.greedy and arguments.num_samples > 1:
        raise UserError("--greedy writes the same text every time; leave out --num-samples.")
    if arguments.temperature <= 0:
        raise UserError(
            f"--temperature is {arguments.temperature:g}; it must be above 0 (or use --greedy)."
        )
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p is {arguments.top_p:g}; it must be above 0 and at most 1.")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt

    from megatron_wd.evals.generate import generate

    texts = generate(
        Path(arguments.folder),
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        num_samples=arguments.num_samples,
        temperature=None if arguments.greedy else arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    if arguments.json:
        print(json.dumps({"prompt": prompt, "texts": texts}, indent=2, ensure_ascii=False))
        return 0
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)} ---")
        print(prompt + text)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
