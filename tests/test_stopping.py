"""Stopping a run: signals, kills, NaN, a full disk. What was saved stays; the rest goes on exactly."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import metrics, results_of, run_config, run_ranks

LAUNCHER = Path(__file__).parents[1] / "launch" / "pretrain.sh"
TP2 = "parallel.tensor=2"


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Path:
    """An uninterrupted run of 60 steps."""
    run_dir = tiny.parent / "whole"
    assert run_config(2, tiny, f"run_dir={run_dir}", TP2, "train.steps=60") == [0, 0]
    return run_dir


def start(tiny: Path, run_dir: Path, *overrides: str) -> subprocess.Popen:
    command = [
        sys.executable,
        LAUNCHER,
        tiny,
        f"run_dir={run_dir}",
        TP2,
        "train.steps=60",
        *overrides,
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_"))}
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def wait_for_step(
    run_dir: Path, step: int, process: subprocess.Popen, timeout_s: float = 90
) -> None:
    deadline = time.monotonic() + timeout_s
    path = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.is_file() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    output = process.communicate()[0] if process.poll() is not None else ""
    raise AssertionError(f"step {step} was not reached:\n{output}")


@pytest.mark.distributed
def test_sigterm_saves_exits_with_3_and_resumes_exactly(tiny: Path, whole: Path) -> None:
    run_dir = tiny.parent / "terminated"
    process = start(tiny, run_dir)
    wait_for_step(run_dir, 7, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 3, output
    saved = int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 7 <= saved < 60
    assert f"stopped by a signal after step {saved}; saved" in output
    process = start(tiny, run_dir)
    assert process.wait(timeout=120) == 0
    assert results_of(run_dir) == results_of(whole)


@pytest.mark.distributed
def test_kills_at_random_moments_change_nothing(tiny: Path, whole: Path) -> None:
    run_dir = tiny.parent / "killed"
    moments = random.Random(0)
    for _ in range(2):
        process = start(tiny, run_dir, "checkpoint.every_steps=3", "checkpoint.keep_last=2")
        rows = len((run_dir / "metrics.jsonl").read_text().splitlines()) if run_dir.is_dir() else 0
        wait_for_step(run_dir, max(1, rows - 2), process)
        time.sleep(moments.uniform(0.0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        kill_workers(run_dir)
        process.wait()
    process = start(tiny, run_dir)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert results_of(run_dir) == results_of(whole)


def kill_workers(run_dir: Path) -> None:
    """Workers are sessions of their own: kill each whose command line names the run."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"run_dir={run_dir}".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            pass


@pytest.mark.distributed
def test_a_cut_off_save_is_ignored_and_said(tiny: Path, capfd: pytest.CaptureFixture) -> None:
    run_dir = tiny.parent / "cut"
    short = [f"run_dir={run_dir}", "train.steps=6", "checkpoint.every_steps=3"]
    assert run_config(1, tiny, *short) == [0]
    folder = run_dir / "checkpoints"
    shutil.move(folder / "iter_0000006", folder / ".partial-iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("3\n")
    capfd.readouterr()
    assert run_config(1, tiny, *short) == [0]
    output = capfd.readouterr().out
    assert "an earlier save of iter_0000006 was cut off" in output
    assert "(step 3)" in output
    assert (folder / "iter_0000006").is_dir()
    assert not list(folder.glob(".partial-*"))


@pytest.mark.distributed
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "metadata"])
def test_a_damaged_checkpoint_is_refused(
    damage: str, tiny: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = tiny.parent / f"damaged {damage}"
    short = [f"run_dir={run_dir}", "train.steps=6", "checkpoint.every_steps=3"]
    assert run_config(1, tiny, *short) == [0]
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder / "iter_0000006")
    (
        folder / "latest_checkpointed_iteration.txt"
    ).unlink()  # the newest complete one is found all the same
    (weights,) = [
        p for p in (folder / "iter_0000003").glob("*.distcp") if p.stat().st_size > 100_000
    ]
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0x55
    if damage == "flip":
        weights.write_bytes(content)
    elif damage == "truncate":
        os.truncate(weights, len(content) // 2)
    elif damage == "remove":
        weights.unlink()
    else:
        os.truncate(weights.parent / ".metadata", 50)
    capfd.readouterr()
    assert run_config(1, tiny, *short) == [2]
    assert "iter_0000003 cannot be loaded into this run" in capfd.readouterr().err


@pytest.mark.distributed
def test_nan_on_one_rank_stops_all_before_the_update(tiny: Path) -> None:
    run_dir = tiny.parent / "nan"
    outcomes = run_ranks(2, _train_with_nan, str(tiny), f"run_dir={run_dir}")
    for message, unchanged in outcomes:
        assert message.startswith("step 3: "), message
        assert "rank 1 (tensor 0, pipeline 0, data 1)" in message
        assert "rank 0" not in message
        assert unchanged
    assert list(metrics(run_dir)) == [1, 2]
    assert not list((run_dir / "checkpoints").glob("iter_*"))


def _train_with_nan(config: str, override: str) -> tuple[str, bool]:
    """Trains two steps, breaks a weight of rank 1 after them, and trains on.

    Returns:
        The error's message, and whether all weights are what they were before the step that failed.
    """
    import torch

    from megatron_wd.backend.world import start_world
    from megatron_wd.config import load_config
    from megatron_wd.train.loop import train
    from megatron_wd.train.setup import set_up
    from megatron_wd.train.step import NonFiniteError

    loaded = load_config(config, [override, "log.tensorboard=false"])
    world = start_world(loaded.parallel)
    run = set_up(loaded, world)
    parameters = [p for chunk in run.model for p in chunk.parameters()]
    before: list[torch.Tensor] = []
    update = run.optimizer.megatron.step_with_ready_grads

    def update_and_break_on_second_step() -> bool:
        done = update()
        if run.progress.step == 1 and world.rank == 1:
            parameters[0].data.fill_(float("nan"))
        before[:] = [p.detach().clone() for p in parameters]
        return done

    run.optimizer.megatron.step_with_ready_grads = update_and_break_on_second_step
    try:
        train(run, SimpleNamespace(requested=False))  # type: ignore[arg-type]
    except NonFiniteError as error:
        same = [
            torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0))
            for p, q in zip(parameters, before, strict=True)
        ]
        return str(error), all(same)
    return "trained on", False


@pytest.mark.distributed
def test_a_full_disk_leaves_the_checkpoint_before(tiny: Path, capfd: pytest.CaptureFixture) -> None:
    run_dir = tiny.parent / "full"
    short = [
        f"run_dir={run_dir}",
        "checkpoint.every_steps=3",
        "train.steps=9",
        "optim.warmup_steps=1",
    ]
    assert run_config(2, tiny, *short, "train.steps=3") == [0, 0]
    more = [*short, "checkpoint.accept_config_change=true"]
    codes = run_ranks(2, _train_on_a_small_disk, str(tiny), more)
    assert codes == [2, 2]
    error = capfd.readouterr().err
    assert "iter_0000006 could not be saved" in error
    assert "The checkpoint before it stays the latest" in error
    folder = run_dir / "checkpoints"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert [p.name for p in folder.iterdir() if p.is_dir()] == ["iter_0000003"]
    assert run_config(2, tiny, *more) == [0, 0]


def _train_on_a_small_disk(config: str, overrides: list[str]) -> int:
    """No file may grow beyond 100 kB: the weights' file cannot be written to its end."""
    from ranks import train

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return train(config, overrides)
