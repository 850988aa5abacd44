"""The numbers that a run prints, and the file that it keeps, each as a pure function."""

import json
from pathlib import Path

import pytest
from ranks import metrics, run_config, run_ranks
from test_layouts import forget_after

from megatron_wd.config import load_config


def test_flops_are_those_of_the_matrix_products(tiny: Path) -> None:
    from megatron_wd.train.throughput import flops_per_token

    model = load_config(tiny, []).model
    d, f, heads, groups, e, s = 64, 96, 4, 2, 16, 32
    forward = 0.0
    for _ in range(4):
        forward += 2 * d * (heads + 2 * groups) * e  # q, k, v
        forward += 2 * d * heads * e  # output projection
        forward += 2 * 2 * heads * e * (s / 2)  # scores and their use, half of them masked
        forward += 2 * 3 * d * f  # gate, up, down
    forward += 2 * d * 251
    assert flops_per_token(model, s) == pytest.approx(3 * forward)


def test_rows_after_the_checkpoint_and_half_a_row_are_cut_off(tmp_path: Path) -> None:
    from megatron_wd.train.metrics import MetricsWriter

    rows = [json.dumps({"step": step, "loss/train": 1.0}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 5, "lo')
    writer = MetricsWriter(tmp_path, 2, None)
    writer.write(3, {"loss/train": 2.0, "mfu": None})
    writer.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss/train"]) for row in kept] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_progress_line_says_how_long_it_takes() -> None:
    from megatron_wd.train.metrics import progress_line

    line = progress_line(100, 1000, 3.25, 1e-3, 0.5, 12_345.6, 4.1)
    assert "step  100/1000" in line
    assert "12,346 tokens/s" in line
    assert line.endswith("ETA 1:01:30")


@pytest.mark.distributed
def test_a_run_leaves_what_the_readme_promises(tiny: Path, capfd: pytest.CaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tiny.parent / "run"
    layout = ["parallel.pipeline=2", "checkpoint.every_steps=5", "checkpoint.keep_last=2"]
    assert run_config(2, tiny, *layout) == [0, 0]
    output = capfd.readouterr().out
    assert len(output.split("step  1/20")[0].splitlines()) <= 40
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {
        "loss/train", "loss/valid", "lr", "weight_decay", "grad_norm", "tokens", "tokens_per_s",
        "tflops", "mfu", "step_s", "memory_bytes",
    }  # fmt: skip
    names |= {"loss/seen", "loss/gap"}
    scalars = {name for name in rows[-1] if "/" not in name or name.startswith("loss/")}
    assert names | {"step", "time_s"} == scalars
    kinds = ["q", "k", "v", "proj", "fc1_gate", "fc1_up", "fc2", "embedding", "head"]
    measured = {f"effective_lr/{kind}" for kind in (*kinds, "mean", "rms", "joint")}
    assert (
        measured | {"weight_norm/norm", "relaxed/q", "effective_lr_by_layer/3"} <= rows[-1].keys()
    )
    assert rows[-1]["tokens"] == 20 * 8 * 32
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert names <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss/train")] == list(range(1, 21))
    assert events.Scalars("loss/valid")[-1].value == pytest.approx(rows[-1]["loss/valid"], rel=1e-6)
    assert {"config/text_summary", "weight_decay/text_summary"} <= set(events.Tags()["tensors"])
    plugins = events.summary_metadata
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= plugins.keys()
    assert "custom_scalars__config__" in plugins
    from pyarrow import parquet  # here, because it starts threads

    matrices = parquet.read_table(run_dir / "matrices").to_pylist()
    assert [row["step"] for row in matrices[:: len(matrices) // 2]] == [10, 20]
    assert len(matrices) == 2 * (4 * 9 + 3)
    table = (run_dir / "weight_decay.tsv").read_text().splitlines()
    assert table[0].startswith("parameter\tshape\trule\tweight_decay\t")
    assert len(table) == 1 + 4 * 6 + 3
    assert "decoder.layers.7.mlp.linear_fc1.weight\t192x64\tall\t0.1\t1\tadamw" in table
    assert json.loads((run_dir / "provenance.json").read_text())["world_size"] == 2
    folders = sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.is_dir())
    assert folders == ["iter_0000015", "iter_0000020"]
    for kept in ("config.yaml", "tokenizer/tokenizer.json", "metadata.json", ".metadata"):
        assert (run_dir / "checkpoints" / "iter_0000020" / kept).is_file()


@pytest.mark.distributed
def test_another_config_in_the_same_folder_is_refused(
    tiny: Path, capfd: pytest.CaptureFixture
) -> None:
    short = [f"run_dir={tiny.parent / 'same'}", "train.steps=6"]
    assert run_config(1, tiny, *short) == [0]
    capfd.readouterr()
    assert run_config(1, tiny, *short, "train.z_loss=0.5") == [2]
    error = capfd.readouterr().err
    assert "train.z_loss: 0.0 -> 0.5" in error
    assert "checkpoint.accept_config_change=true" in error
    # Where and how often are no part of what is computed.
    assert run_config(1, tiny, *short, "log.every_steps=2", "evaluate.samples=5") == [0]
    longer = [*short[:1], "train.steps=8", "checkpoint.accept_config_change=true"]
    assert run_config(1, tiny, *longer) == [0]
    assert "train.steps: 6 -> 8" in capfd.readouterr().out


@pytest.mark.distributed
def test_rates_and_decay_may_change_on_resume_and_it_is_recorded(
    tiny: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = tiny.parent / "changed"
    first = [f"run_dir={run_dir}", "train.steps=20", "checkpoint.every_steps=10"]
    assert run_config(2, tiny, *first) == [0, 0]
    before = metrics(run_dir)
    forget_after(run_dir, 10)
    capfd.readouterr()
    changed = ["optim.lr=1e-3", "optim.weight_decay=1.0", "optim.decay=matrices_only"]
    assert run_config(2, tiny, *first, *changed) == [0, 0]
    assert "optim.lr: 0.003 -> 0.001" in capfd.readouterr().out
    (line,) = (run_dir / "config_changes.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["after_step"] == 10
    assert "optim.decay: all -> matrices_only" in record["changes"]
    after = metrics(run_dir)
    assert after[10] == before[10]
    assert after[11]["lr"] == pytest.approx(before[11]["lr"] / 3)
    assert (after[11]["weight_decay"], before[11]["weight_decay"]) == (1.0, 0.1)
    assert after[20]["equilibrium_effective_lr/q"] == pytest.approx((2 * 1e-4 / 19) ** 0.5)
    assert after[11]["loss/train"] == pytest.approx(before[11]["loss/train"], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=fp8", "model.vocab_size=256"], "fp8 cannot run on the CPU"),
        (["data.train=[{path: nowhere}]"], "nowhere.bin does not exist"),
        (["model.vocab_size=250"], "has 251 ids, more than"),
        (["evaluate.samples=100000"], "evaluate.samples=100000"),
        (["parallel.context=2"], "context=2"),
        (["run_dir=/proc/nowhere"], "run_dir /proc/nowhere cannot be written"),
    ],
)
def test_what_this_machine_or_data_cannot_do_is_said_before_training(
    overrides: list[str], message: str, tiny: Path, capfd: pytest.CaptureFixture
) -> None:
    ranks = 2 if "context" in overrides[0] else 1
    overrides = [f"run_dir={tiny.parent / 'never'}", *overrides]
    assert run_config(ranks, tiny, *overrides) == [2] * ranks
    assert message in capfd.readouterr().err
    assert not (tiny.parent / "never").exists()


@pytest.mark.distributed
def test_the_cpu_stand_in_keeps_random_streams_apart() -> None:
    (draws,) = run_ranks(1, _draw)
    assert draws["default before"] != draws["named"]
    assert draws["default after"] == draws["default expected"]
    assert draws["device"] == "cpu"
    assert draws["outside"] == "torch.FloatTensor"


def _draw() -> dict:
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import seed_step, start_world
    from megatron_wd.config import ParallelConfig

    start_world(ParallelConfig())
    seed_step(1, 1)
    expected = [torch.rand(1).item(), torch.rand(1).item()]
    seed_step(1, 1)
    before = torch.rand(1).item()
    with get_cuda_rng_tracker().fork():
        named = torch.rand(1).item()
    after = torch.rand(1).item()
    with cpu.cuda_requests_on_cpu():
        inside = torch.ones(1, device="cuda")
        assert inside.type() == "torch.cuda.FloatTensor"
    return {
        "default before": before,
        "named": named,
        "default after": after,
        "default expected": expected[1],
        "device": inside.device.type,
        "outside": inside.type(),
    }
