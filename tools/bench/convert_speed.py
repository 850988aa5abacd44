"""Measures imports and exports against copying the same bytes on the same disk.

A Llama of 1B parameters with random bf16 weights is made, one tensor at a time. Then whole processes
take turns: `cp -r` of the weights, `convert.py from-hf`, `convert.py to-hf`. Each writes files that
did not exist, and each time includes the sync that brings them to the disk. The start (Python, imports)
is measured by the same commands on a model of a few kilobytes, and taken off.

    python tools/bench/convert_speed.py FOLDER [--repeats 3] [--layers 16]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
CONVERT = [sys.executable, str(ROOT / "tools" / "convert.py")]


def make_model(folder: Path, layers: int, width: int = 2048) -> int:
    """Writes a Hugging Face folder; returns the bytes of its weights."""
    import torch

    from megatron_wd.config import ModelConfig
    from megatron_wd.convert.hf_config import export_config
    from megatron_wd.convert.names import tensors_of
    from megatron_wd.convert.safetensors_file import Entry, ShardWriter, index_json, plan_shards

    model = ModelConfig(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=width * 43 // 16,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=32000 if width == 2048 else 128,
        max_positions=2048,
    )
    folder.mkdir(parents=True)
    entries = [Entry(name, shape) for t in tensors_of(model) for name, shape in t.hf]
    plan = plan_shards(entries, "bfloat16", 10**9)
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, plan, "bfloat16") as writer:
        for entry in entries:
            bits = torch.randint(
                -(2**15), 2**15, entry.shape, generator=generator, dtype=torch.int16
            )
            writer.write(entry.name, bits.view(torch.bfloat16))
    (folder / "model.safetensors.index.json").write_text(index_json(plan))
    config = export_config(
        model, max_positions=2048, dtype="bfloat16", ids={"bos_token_id": 1, "eos_token_id": 2}
    )
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return plan.total_bytes


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words, because an export wants one."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')


def timed(command: list[str], folder: Path) -> tuple[float, float, int]:
    """Runs a command and the sync of its files; returns seconds, CPU seconds, peak resident bytes."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    subprocess.run(["sync", "-f", str(folder)], check=True)
    seconds = time.perf_counter() - started
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder on the disk to measure, for some 10 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=20, help="blocks; 20 are 1B parameters")
    arguments = parser.parse_args()
    work = arguments.folder / f"convert_speed-{os.getpid()}"
    source = work / "hf"
    try:
        total = make_model(source, arguments.layers)
        make_model(work / "tiny-hf", 1, 128)
        for name in ("", "tiny-"):
            out = [str(work / f"{name}hf"), str(work / f"{name}start")]
            subprocess.run([*CONVERT, "from-hf", *out], check=True, stdout=subprocess.DEVNULL)
        weights = [str(path) for path in source.glob("*.safetensors")]
        largest = max(Path(path).stat().st_size for path in weights)
        jobs = {
            "start of from-hf": [*CONVERT, "from-hf", str(work / "tiny-hf")],
            "start of to-hf": [*CONVERT, "to-hf", str(work / "tiny-start")],
            "cp": ["cp", *weights],
            "from-hf": [*CONVERT, "from-hf", str(source)],
            "to-hf": [*CONVERT, "to-hf", str(work / "start")],
        }
        runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in jobs}
        for _ in range(arguments.repeats):
            for name, command in jobs.items():
                target = work / "out"
                if name == "cp":
                    target.mkdir()
                runs[name].append(timed([*command, str(target)], work))
                shutil.rmtree(target)
                subprocess.run(["sync", "-f", str(work)], check=True)
        report(runs, total, largest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def report(runs: dict[str, list[tuple[float, float, int]]], total: int, largest: int) -> None:
    """Prints medians, their spread, the ratio to cp without the start, and memory."""
    seconds = {name: [wall for wall, _, _ in values] for name, values in runs.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{total / 1e9:.2f} GB of weights, largest file {largest / 1e9:.2f} GB")
    for name, values in runs.items():
        cpu = statistics.median(cpu for _, cpu, _ in values)
        line = f"{name:<17}{median[name]:6.2f} s ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})"
        line += f", CPU {cpu:.2f} s"
        if name in ("from-hf", "to-hf"):
            ratio = (median[name] - median[f"start of {name}"]) / median["cp"]
            peak = max(memory for _, _, memory in values)
            line += f", {ratio:.2f} x cp besides the start, peak {peak / 1e9:.2f} GB"
        print(line)


if __name__ == "__main__":
    main()
