"""Models between Megatron checkpoints and Hugging Face folders.

to-hf RUN_OR_CHECKPOINT OUT    exports a checkpoint of any layout for transformers
from-hf HF_FOLDER OUT          makes a checkpoint that runs of any layout can start from
inspect PATH                   says what a folder of either kind holds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.config.cli import run_main

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Reads a size such as 5GB, 500MB or 2GiB, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_to_hf(commands)
    from_hf = commands.add_parser(
        "from-hf",
        help="make a checkpoint from a Hugging Face folder",
        description="Makes a Megatron checkpoint from a Hugging Face folder: one CPU process, no GPU. "
        "Runs of any layout can start from it (init_from), and to-hf gives back the same bits.",
    )
    from_hf.add_argument("source", metavar="HF_FOLDER", help="folder with config.json, safetensors")
    from_hf.add_argument("out", metavar="OUT", help="checkpoint folder to write")
    from_hf.add_argument("--force", action="store_true", help="replace an earlier import in OUT")
    from_hf.add_argument("--json", action="store_true", help="print the result as JSON")
    inspect = commands.add_parser(
        "inspect",
        help="say what a folder holds",
        description="Says what a folder holds, from its description alone: no weights are read.",
    )
    inspect.add_argument("path", metavar="PATH", help="run, checkpoint or Hugging Face folder")
    inspect.add_argument("--step", type=int, help="checkpoint of this step (default: the latest)")
    inspect.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(argv)


def _add_to_hf(commands: argparse._SubParsersAction) -> None:
    to_hf = commands.add_parser(
        "to-hf",
        help="export a checkpoint of any layout for transformers",
        description="Exports a checkpoint for transformers: one CPU process, no GPU, any layout.",
    )
    to_hf.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="run folder, its checkpoints folder, or one checkpoint (iter_0001000), moved anywhere",
    )
    to_hf.add_argument("out", metavar="OUT", help="Hugging Face folder to write")
    to_hf.add_argument("--step", type=int, help="checkpoint of this step (default: the latest)")
    to_hf.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="of the weights (default: as in the checkpoint)"
    )
    to_hf.add_argument(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="largest weight file (default: 5GB)",
    )
    to_hf.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer to use instead of the checkpoint's own"
    )
    to_hf.add_argument(
        "--verify", action="store_true", help="load the export and compare logits with Megatron's"
    )
    to_hf.add_argument("--force", action="store_true", help="replace an earlier export in OUT")
    to_hf.add_argument("--json", action="store_true", help="print the result as JSON")


@contextlib.contextmanager
def progress_bar() -> Iterator:
    """A bar on the terminal's stderr, which takes bytes done and bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("writing weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def to_hf(arguments: argparse.Namespace) -> int:
    from megatron_wd.convert.to_hf import export_checkpoint

    with progress_bar() as progress:
        report = export_checkpoint(
            arguments.source,
            arguments.out,
            step=arguments.step,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_size,
            tokenizer=arguments.tokenizer,
            force=arguments.force,
            progress=progress,
        )
    result = asdict(report)
    if not arguments.json:
        step = "unknown" if report.step is None else report.step
        print(f"exported {report.checkpoint} (step {step}) to {report.folder}")
        print(
            f"  {report.num_tensors} tensors, {report.dtype}, {report.weight_bytes / 1e6:,.1f} MB "
            f"in {report.num_files} file{'s' * (report.num_files > 1)}, {report.seconds:.1f} s"
        )
    failed = False
    if arguments.verify:
        from megatron_wd.convert.verify import describe, verify_export

        # What was exported, not the latest: a running job may have saved another one by now.
        verified = verify_export(report.checkpoint, report.folder, dtype=report.dtype)
        result["verify"] = {**asdict(verified), "passed": verified.passed}
        failed = not verified.passed
        if not arguments.json or failed:
            print(f"  {describe(verified)}", file=sys.stderr if failed else sys.stdout)
    if arguments.json:
        print(json.dumps(result, indent=2))
    elif not failed:
        print(f'  try it: python tools/generate.py {report.folder} --prompt "Once upon a time"')
    return 1 if failed else 0


def from_hf(arguments: argparse.Namespace) -> int:
    from megatron_wd.convert.from_hf import import_folder

    with progress_bar() as progress:
        report = import_folder(
            arguments.source, arguments.out, force=arguments.force, progress=progress
        )
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    print(f"imported {report.source} ({report.family}) to {report.folder}")
    print(
        f"  {report.num_tensors} tensors, {', '.join(report.dtypes)}, "
        f"{report.weight_bytes / 1e6:,.1f} MB, {report.seconds:.1f} s"
    )
    for note in report.notes:
        print(f"  note: {note}")
    print(f"  train from it: base: {report.folder}/config.yaml and init_from: {report.folder}")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    from megatron_wd.convert.inspection import describe, inspect_folder

    facts = inspect_folder(arguments.path, step=arguments.step)
    print(json.dumps(facts, indent=2) if arguments.json else describe(facts))
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    # Torch reads it at its first allocation: large pages, a third less time for large tensors.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return {"to-hf": to_hf, "from-hf": from_hf, "inspect": inspect}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run_main(main))
