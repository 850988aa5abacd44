"""Training speed against a plain PyTorch loop of the same Llama: tokens/s, medians and ratios.

train_speed.py [--repeats 5] [--only ours,plain] [--compile] [--json]

Every measurement is a process of its own, and the ways of training take turns, so that whatever
else the machine does slows all of them alike. The plain loop is tools/bench/plain_llama.py: one
process, all cores. Ours is launch/pretrain.sh with configs/bench/llama2_30m.yaml, as one process
and as two tensor-parallel ones, on random tokens that this benchmark writes. In bf16 the plain loop
is measured in both usual ways, and the faster one is what ours is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "bench" / "llama2_30m.yaml"
VOCAB_SIZE = 4096
sys.path.insert(0, str(ROOT))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="runs of each (default: 5)")
    add("--steps", type=int, default=5, help="timed steps of a run (default: 5)")
    add("--warmup", type=int, default=2, help="steps before them that do not count (default: 2)")
    add("--precisions", default="fp32,bf16", help="(default: fp32,bf16)")
    add("--only", help="names that a measurement must contain one of, such as plain,TP1")
    add("--compile", action="store_true", help="also torch.compile the plain loop (needs g++)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def write_data(folder: Path) -> None:
    """Writes random tokens and a tokenizer that fits them; nobody ever encodes text with it."""
    import numpy as np
    import tokenizers

    from megatron_wd.data.indexed_writer import IndexedWriter
    from megatron_wd.data.tokenizer import load_tokenizer

    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spellings = ["</s>", *characters]
    spellings += [f"unused {i}" for i in range(VOCAB_SIZE - len(spellings))]
    vocabulary = {spelling: i for i, spelling in enumerate(spellings)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.add_special_tokens(["</s>"])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    identity = load_tokenizer(folder / "tokenizer").identity()

    rng = np.random.default_rng(0)
    for name, documents in (("train", 256), ("valid", 32)):
        with IndexedWriter(str(folder / name), np.dtype("uint16")) as writer:
            tokens = rng.integers(0, VOCAB_SIZE, (documents, 1024), dtype=np.uint16)
            tokens[:, -1] = 0
            writer.add(tokens.tobytes(), np.full(documents, 1024, dtype=np.int32).tobytes())
            counts = {"documents": documents, "tokens": int(tokens.size)}
            writer.finish({"format": 1, "tokenizer": identity, **counts})


def run_command(command: list[str]) -> str:
    """Runs one process to its end and returns its output."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def measure_plain(args: argparse.Namespace, way: str, compiled: bool) -> float:
    """Tokens/s of the plain loop."""
    command = [sys.executable, str(ROOT / "tools" / "bench" / "plain_llama.py")]
    command += ["--precision", way, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    command += ["--threads", str(os.cpu_count() or 1)] + ["--compile"] * compiled
    return json.loads(run_command(command).splitlines()[-1])["tokens_per_s"]


def measure_ours(args: argparse.Namespace, folder: Path, precision: str, tensor: int) -> float:
    """Tokens/s of our training program, the median of its logged steps after the warm-up."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    data = folder / "data"
    command = [sys.executable, str(ROOT / "launch" / "pretrain.sh"), str(CONFIG)]
    command += [f"run_dir={run_dir}", f"precision={precision}", f"parallel.tensor={tensor}"]
    command += [f"train.steps={args.warmup + args.steps}", f"data.tokenizer={data / 'tokenizer'}"]
    command += [f"data.{part}=[{{path: {data / part}}}]" for part in ("train", "valid")]
    run_command(command)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    return statistics.median(speeds[args.warmup :])


def measurements(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What to measure: name -> function without arguments that returns tokens/s."""
    found: dict[str, Any] = {}
    for precision in args.precisions.split(","):
        ways = [precision] + ["bf16-autocast"] * (precision == "bf16")
        for way in ways:
            found[f"{way} plain"] = lambda way=way: measure_plain(args, way, False)
            if args.compile:
                found[f"{way} plain compiled"] = lambda way=way: measure_plain(args, way, True)
        for tensor in (1, 2):
            found[f"{precision} ours TP{tensor}"] = lambda precision=precision, tensor=tensor: (
                measure_ours(args, folder, precision, tensor)
            )
    wanted = args.only.split(",") if args.only else [""]
    return {name: run for name, run in found.items() if any(part in name for part in wanted)}


def summarize(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Median and range of each, and its ratio to the (faster) plain loop of the same precision.

    The ratio is the median of the ratios within one round, where both met the same machine.
    """
    result: dict[str, Any] = {}
    for name, values in speeds.items():
        precision = name.split()[0].split("-")[0]
        plain = [n for n in speeds if n.startswith(precision) and n.endswith(" plain")]
        entry: dict[str, Any] = {
            "median_tokens_per_s": round(statistics.median(values), 1),
            "range_tokens_per_s": [round(min(values), 1), round(max(values), 1)],
        }
        if plain:
            best = max(plain, key=lambda n: statistics.median(speeds[n]))
            ratios = [a / b for a, b in zip(values, speeds[best], strict=True)]
            entry["ratio"] = round(statistics.median(ratios), 3)
            entry["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
            entry["compared_with"] = best
        result[name] = entry
    return result


def main() -> int:
    args = parse_arguments()
    if args.compile and not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("error: --compile needs a C++ compiler (g++, or the one that CXX names)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        ways = measurements(args, folder)
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(args.repeats):
            for way, run in ways.items():
                speeds[way].append(run())
            line = ", ".join(f"{way} {values[-1]:.0f}" for way, values in speeds.items())
            print(f"round {repeat + 1} of {args.repeats}: {line}", file=sys.stderr, flush=True)
    result = summarize(speeds)
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "results": result}, indent=2))
        return 0
    for way, entry in result.items():
        low, high = entry["range_tokens_per_s"]
        line = f"{way:28} {entry['median_tokens_per_s']:8.0f} tokens/s ({low:.0f} to {high:.0f})"
        if "ratio" in entry:
            low, high = entry["ratio_range"]
            line += f"  {entry['ratio']:.2f} ({low:.2f} to {high:.2f}) of {entry['compared_with']}"
        print(line)
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
