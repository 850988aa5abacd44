"""Speed of tools/prepare_data.py against the way Megatron-LM's preprocess_data.py works.

tokenize_speed.py --tokenizer PATH [--input FILE.jsonl] [--reference-command '... {input} {output}
...']

Whole processes, from JSON Lines to .bin/.idx, start-up included; taken in turns, so that a busy
machine slows both. The reference command is best Megatron-LM's own script; without it, the same
approach written here is run: a multiprocessing pool that encodes one document per call with the
Hugging Face or SentencePiece library and sends Python lists to one IndexedDatasetBuilder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOOLS.parent))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokenizer", required=True, help="Hugging Face folder or SentencePiece .model")
    add("--input", help="a .jsonl with a field `text` (default: Python's standard library)")
    add("--repeats", type=int, default=5, help="runs of each (default: 5)")
    add("--workers", type=int, default=2, help="processes of each (default: 2)")
    add("--reference-command", help="{input}, {output}, {tokenizer}, {workers} are filled in")
    add("--json", action="store_true", help="print the result as JSON")
    add("--as-reference", metavar="OUT", help=argparse.SUPPRESS)
    return parser.parse_args()


def standard_library(path: Path) -> None:
    """Writes the default input."""
    with path.open("w", encoding="utf-8") as out:
        for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" not in file.parts:
                text = file.read_bytes().decode("utf-8", errors="replace")
                out.write(json.dumps({"text": text}) + "\n")


def timed(command: list[str]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of one process with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = Path(args.input or folder / "stdlib.jsonl")
    if not args.input:
        standard_library(source)
    ours_out, theirs_out = str(folder / "ours"), str(folder / "theirs")
    workers = str(args.workers)
    ours = [
        *(sys.executable, str(TOOLS / "prepare_data.py"), "--input", str(source), "--force"),
        *("--output", ours_out, "--tokenizer", args.tokenizer, "--workers", workers),
    ]
    if args.reference_command:
        values = {"input": source, "output": theirs_out, "tokenizer": args.tokenizer}
        filled = args.reference_command.format(**values, workers=workers)
        theirs = shlex.split(filled)
    else:
        theirs = [
            *(sys.executable, __file__, "--input", str(source), "--workers", workers),
            *("--tokenizer", args.tokenizer, "--as-reference", theirs_out),
        ]
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "reference": []}
    for repeat in range(args.repeats):
        times["ours"].append(timed(ours))
        times["reference"].append(timed(theirs))
        line = ", ".join(f"{name} {runs[-1][0]:.2f} s" for name, runs in times.items())
        print(f"run {repeat + 1} of {args.repeats}: {line}", file=sys.stderr, flush=True)
    their_bin = next(Path(folder).glob("theirs*.bin"))
    megabytes = source.stat().st_size / 1e6
    result: dict[str, Any] = {
        "input_mb": round(megabytes, 1),
        "tokenizer": args.tokenizer,
        "reference": args.reference_command or "the same approach, megatron_wd/data/plain.py",
        "equal_output": Path(ours_out + ".bin").read_bytes() == their_bin.read_bytes(),
        "load_average": os.getloadavg()[0],
    }
    for name, runs in times.items():
        walls = [wall for wall, _ in runs]
        result[name] = {
            "median_s": round(statistics.median(walls), 3),
            "range_s": [round(min(walls), 3), round(max(walls), 3)],
            "median_cpu_s": round(statistics.median(cpu for _, cpu in runs), 3),
            "mb_per_s": round(megabytes / statistics.median(walls), 2),
        }
    for key, unit in (("ratio", "median_s"), ("cpu_ratio", "median_cpu_s")):
        result[key] = round(result["reference"][unit] / result["ours"][unit], 2)
    return result


def main() -> int:
    args = parse_arguments()
    if args.as_reference:
        from megatron_wd.data.plain import prepare_plain

        prepare_plain(args.input, args.tokenizer, args.as_reference, args.workers)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{result['input_mb']} MB, tokenizer {result['tokenizer']}, {args.workers} workers")
    for name in ("ours", "reference"):
        r = result[name]
        print(
            f"{name:9}  median {r['median_s']:7.2f} s  ({r['range_s'][0]:.2f} to "
            f"{r['range_s'][1]:.2f})  {r['mb_per_s']:7.1f} MB/s  CPU {r['median_cpu_s']:.1f} s"
        )
    print(
        f"{result['ratio']} times as fast, {result['cpu_ratio']} times less CPU; output "
        f"{'equal' if result['equal_output'] else 'DIFFERENT'}; load {result['load_average']:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
