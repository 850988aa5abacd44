"""Tokenizes text to Megatron's .bin/.idx, or merges the shards of a job array.

prepare_data.py --input FILES... --tokenizer PATH --output PREFIX     one job
prepare_data.py ... --output PREFIX --shard I/N                       job I of N (from 0)
prepare_data.py merge --output PREFIX                                 when all N are done

Every document ends with one end-of-document token. Empty documents give nothing and are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.config.cli import run_main


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders, globs; or hf:NAME",
    )
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json")
    add("--tokenizer", required=True, metavar="PATH", help="Hugging Face folder or .model file")
    add("--format", default="auto", help="text, jsonl or parquet; auto goes by the file name")
    add("--text-key", default="text", help="field or column that holds the text (default: text)")
    add("--eos-id", type=int, help="end-of-document token, if the tokenizer's own is not wanted")
    add("--on-error", default="stop", help="stop, replace or skip documents that are not valid")
    add(
        "--validation-fraction", type=float, default=0.0, metavar="F", help="share for PREFIX-valid"
    )
    add("--shard", metavar="I/N", help="do part I (0 to N-1) of N; its name is added to PREFIX")
    add("--workers", type=int, help="number of processes (default: one per core)")
    add("--reference", action="store_true", help="never use the fast encoder")
    _add_common(parser)
    return parser.parse_args(argv)


def parse_merge_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py merge",
        description="Concatenates the shards of PREFIX; refuses if one is missing or different.",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="as given to the shards")
    parser.add_argument("--remove", action="store_true", help="delete the shards afterwards")
    _add_common(parser)
    return parser.parse_args(argv)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="overwrite what exists")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


@contextlib.contextmanager
def progress_bar(label: str, as_bytes: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns: list[Any] = [progress.TextColumn(label), progress.BarColumn()]
    if as_bytes:
        columns += [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns += [progress.TimeRemainingColumn()]
    bar = progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = bar.add_task(label, total=None)
    with bar:

        def show(done: int, total: int) -> None:
            # No refreshing thread: worker processes are forked while the bar exists.
            bar.update(task, completed=done, total=total or None)
            bar.refresh()

        yield show


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_wd.data.encoding import Rules
    from megatron_wd.data.inputs import Shard
    from megatron_wd.data.prepare import prepare_corpus
    from megatron_wd.data.tokenizer import load_tokenizer

    shard = Shard.parse(args.shard) if args.shard else None
    tokenizer = load_tokenizer(args.tokenizer, args.eos_id)
    with progress_bar("tokenizing", as_bytes=True) as progress:
        done = prepare_corpus(
            args.input,
            args.output,
            tokenizer,
            input_format=args.format,
            rules=Rules(args.text_key, args.on_error, args.validation_fraction),
            shard=shard,
            workers=args.workers,
            fast=not args.reference,
            force=args.force,
            progress=progress,
        )
    return {
        "outputs": done.outputs,
        "fast_tokenizer": done.fast_tokenizer,
        "input_bytes": done.input_bytes,
        "seconds": round(done.seconds, 3),
    }


def merge(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_wd.data.shards import merge_shards

    with progress_bar("merging", as_bytes=False) as progress:
        merged = merge_shards(args.output, force=args.force, remove=args.remove, progress=progress)
    return {"outputs": {args.output: merged}}


def report(result: dict[str, Any]) -> None:
    for prefix, output in result["outputs"].items():
        left_out = [
            f"{output[name]:,} {name.split('_')[0]}"
            for name in ("empty_documents", "skipped_documents", "replaced_documents")
            if output[name]
        ]
        print(
            f"{prefix}: {output['documents']:,} documents, {output['tokens']:,} tokens"
            + (f" ({', '.join(left_out)} documents)" if left_out else "")
        )
    if "seconds" in result:
        speed = result["input_bytes"] / 1e6 / max(result["seconds"], 1e-9)
        size = result["input_bytes"] / 1e6
        print(f"{size:,.1f} MB in {result['seconds']:.1f} s, {speed:,.1f} MB/s")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    # Both libraries start threads of their own; one process per core is parallel enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if argv[:1] == ["merge"]:
        args = parse_merge_arguments(argv[1:])
        result = merge(args)
    else:
        args = parse_arguments(argv)
        result = prepare(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
