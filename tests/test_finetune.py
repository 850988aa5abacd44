"""Fine-tuning runs of a tiny model: what is learned, exact resume, and what a run leaves.

Every run is forked: the parent imports trl once and never runs a backward pass.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import metrics, run_ranks
from tiny import VOCAB_SIZE, write_tokenizer

from megatron_wd.config import UserError
from megatron_wd.finetune.grid import parse_axes, plan_cells, run_grid
from megatron_wd.finetune.run import run
from megatron_wd.finetune.run_folder import newest_checkpoint
from megatron_wd.finetune.schema import FinetuneConfig, load_finetune_config

CONFIG = """\
run_dir: {folder}/run
model: {folder}/model
task: {{name: sums, source: ["{folder}/train.jsonl"], origin: a test, licence: none}}
cutoff_tokens: 64
optim: {{lr: 1e-2, weight_decay: 0.1}}
train: {{epochs: 2, batch_samples: 8, micro_batch_samples: 4, precision: fp32}}
checkpoint_every_steps: 7
log_every_steps: 1
"""
STEPS = 20  # 78 samples: 9 full batches and a part of one, twice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with dropout (the RNG must be resumed too), data, and a config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatron_wd.finetune.export
    import megatron_wd.finetune.trainer  # noqa: F401  imported here, for all children

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    write_tokenizer(path / "model_tokenizer")
    for file in (path / "model_tokenizer").iterdir():
        file.rename(path / "model" / file.name)
    rows = [
        {"prompt": f"{i % 10}+{i // 10}", "response": f"={i % 10 + i // 10}"} for i in range(78)
    ]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text(CONFIG.format(folder=path))
    return path


def load(folder: Path, *overrides: str) -> FinetuneConfig:
    return load_finetune_config(folder / "config.yaml", overrides)


def start(function: Callable[..., Any], *args: Any) -> multiprocessing.Process:
    """Forks a process that ends with what the function returns."""

    def child() -> None:
        code = 1
        try:
            code = function(*args)
        finally:
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process  # type: ignore[return-value]


def finish(process: multiprocessing.Process, timeout_s: float = 120) -> int:
    process.join(timeout_s)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def train(config: FinetuneConfig) -> int:
    return finish(start(run, config))


def stop_at(step: int, config: FinetuneConfig, number: int) -> int:
    """Starts a run, and sends it a signal once that step is logged; returns its exit code."""
    process = start(run, config)
    rows = Path(config.run_dir) / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (rows.is_file() and f'"step": {step},' in rows.read_text()):
        assert process.is_alive() and time.monotonic() < deadline, "the step never came"
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    return finish(process)


def losses(run_dir: str | Path) -> dict[int, tuple[float, ...]]:
    rows = metrics(Path(run_dir))
    return {
        s: (r["loss"], r["grad_norm"], r["learning_rate"], r["tokens"]) for s, r in rows.items()
    }


@pytest.fixture(scope="module")
def whole(folder: Path) -> FinetuneConfig:
    """An uninterrupted run."""
    config = load(folder)
    assert train(config) == 0
    return config


def test_run_learns_and_leaves_a_loadable_folder(folder: Path, whole: FinetuneConfig) -> None:
    from megatron_wd.convert.hf_load import load_model, load_tokenizer

    run_dir, rows = Path(whole.run_dir), losses(whole.run_dir)
    assert list(rows) == list(range(1, STEPS + 1))
    assert rows[STEPS][0] < rows[1][0] - 1
    assert rows[STEPS][3] == 2 * json.loads((run_dir / "data.json").read_text())["tokens"]
    base, tuned = folder / "model", run_dir / "hf"
    before, after = load_model(base), load_model(tuned)
    assert any((a != b).any() for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert load_tokenizer(tuned).pad_token is None, "the padding of our batches is not handed on"
    assert json.loads((tuned / "config.json").read_text()) == json.loads(
        (base / "config.json").read_text()
    )
    record = json.loads((tuned / "finetune.json").read_text())
    assert record["steps"] == STEPS and record["final"]["loss"] == rows[STEPS][0]
    assert set(record["files"]) == {path.name for path in tuned.iterdir()}
    assert record["base_model_sha256"][:12] in (tuned / "README.md").read_text()
    assert list((run_dir / "tensorboard").iterdir())
    assert not list((run_dir / "checkpoints").glob("*checkpoint-*"))
    assert "weight_decay: 0.1" in (run_dir / "config.yaml").read_text()


def test_stopped_run_goes_on_with_the_same_losses(folder: Path, whole: FinetuneConfig) -> None:
    config = load(folder, f"run_dir={folder}/stopped")
    assert stop_at(4, config, signal.SIGTERM) == 3
    checkpoint = newest_checkpoint(Path(config.run_dir))
    assert checkpoint is not None and not (Path(config.run_dir) / "hf").exists()
    assert train(config) == 0
    assert losses(config.run_dir) == losses(whole.run_dir)


def test_killed_run_goes_on_with_the_same_losses(folder: Path, whole: FinetuneConfig) -> None:
    config = load(folder, f"run_dir={folder}/killed")
    assert stop_at(10, config, signal.SIGKILL) == -signal.SIGKILL
    checkpoints = Path(config.run_dir) / "checkpoints"
    (checkpoints / "checkpoint-19").mkdir()  # as if it had been killed while it saved
    (checkpoints / "checkpoint-19" / "trainer_state.json").write_text("{")
    assert train(config) == 0
    assert losses(config.run_dir) == losses(whole.run_dir)


def weights(run_dir: str | Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(run_dir) / "hf" / "model.safetensors")


def test_two_processes_learn_the_same(folder: Path) -> None:
    # 72 samples, so that both have as many; no dropout, which is drawn for each process.
    settings = ["task.max_samples=72", f"model={folder}/plain"]
    (folder / "plain").mkdir()
    for file in (folder / "model").iterdir():
        text = file.read_bytes().replace(b'"attention_dropout": 0.1', b'"attention_dropout": 0.0')
        (folder / "plain" / file.name).write_bytes(text)
    one = load(folder, f"run_dir={folder}/one", *settings)
    two = load(folder, f"run_dir={folder}/two", *settings)
    assert train(one) == 0
    assert run_ranks(2, run, two) == [0, 0]
    pairs = zip(losses(one.run_dir).values(), losses(two.run_dir).values(), strict=True)
    for alone, shared in pairs:
        assert shared == pytest.approx(alone, rel=1e-4)
    first, second = weights(one.run_dir), weights(two.run_dir)
    assert all((first[name] - second[name]).abs().max() < 1e-4 for name in first)


def test_finished_run_is_left_alone_and_another_config_is_refused(
    folder: Path, whole: FinetuneConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (Path(whole.run_dir) / "metrics.jsonl").read_bytes()
    assert train(whole) == 0
    assert "this run is done" in capfd.readouterr().out
    assert (Path(whole.run_dir) / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match=r"optim\.lr: 0\.01 -> 0\.02"):
        run(load(folder, "optim.lr=0.02"))


def test_changed_data_are_noticed_when_a_run_goes_on(folder: Path) -> None:
    rows = (folder / "train.jsonl").read_text()
    source = folder / "changing.jsonl"
    source.write_text(rows)
    config = load(folder, f"run_dir={folder}/changing", f"task.source=['{source}']")
    assert stop_at(2, config, signal.SIGTERM) == 3
    source.write_text(rows.replace("=9", "=8"))
    with pytest.raises(UserError, match="sha256 was"):
        run(config)


def test_loss_that_is_no_number_stops_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load(folder, f"run_dir={folder}/nan", "optim.lr=1e30", "optim.warmup_fraction=0")
    assert train(config) == 1
    assert "a lower optim.lr may help" in capfd.readouterr().err
    assert (
        newest_checkpoint(Path(config.run_dir)) is None
        and not (Path(config.run_dir) / "hf").exists()
    )


def test_sharing_weights_is_refused_where_accelerate_would_ignore_it(folder: Path) -> None:
    with pytest.raises(UserError, match=r"train\.fsdp shares a model among several GPUs"):
        run(load(folder, "train.fsdp=true"))


def test_grid_runs_every_cell_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run_dir={folder}/grid", "train.max_steps=3"]
    axes = ["optim.lr=1e-3,1e-2", "seed=7,8", "optim.weight_decay=0.5"]
    arguments = (folder / "config.yaml", overrides, axes)
    cells = plan_cells(str(folder / "config.yaml"), overrides, parse_axes(axes))
    assert train(cells[1].config) == 0  # one is there already
    assert finish(start(run_grid, *arguments)) == 0
    assert capfd.readouterr().out.count("this run is done") == 1
    rows = json.loads((folder / "grid" / "grid.json").read_text())
    assert [(row["optim.lr"], row["seed"], row["state"], row["steps"]) for row in rows] == [
        (lr, seed, "done", 3) for lr in ("1e-3", "1e-2") for seed in ("7", "8")
    ]
    assert len({row["final_loss"] for row in rows}) == 4
    assert Path(rows[0]["folder"]).name == "optim.lr=1e-3,seed=7"
    assert "weight_decay: 0.5" in (Path(rows[0]["folder"]) / "config.yaml").read_text()
    assert (folder / "grid" / "grid.csv").read_text().count("\n") == 5


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["optim.lr"], "expected key=A,B"),
        (["seed=1,2", "seed=3"], "seed comes twice"),
        (["seed=1,1"], "a value comes twice"),
        (["run_dir=a,b"], "a folder of its own"),
    ],
)
def test_wrong_grids(axes: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_axes(axes)


def test_mistake_in_the_last_cell_is_told_before_the_first_runs(folder: Path) -> None:
    with pytest.raises(UserError, match=r"optim\.lr is -1"):
        run_grid(str(folder / "config.yaml"), [f"run_dir={folder}/never"], ["optim.lr=1e-3,-1"])
    assert not (folder / "never").exists()
