"""Base models that do not fit are refused before training, and the command line says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import VOCAB_SIZE, write_tokenizer

from megatron_wd.config import UserError
from megatron_wd.finetune.base_model import model_sha256, open_base_model
from megatron_wd.finetune.schema import FinetuneConfig, load_finetune_config

ROOT = Path(__file__).resolve().parent.parent
PRESET = ROOT / "configs" / "finetune" / "arithmetic.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What of a model is read before its weights."""
    folder = tmp_path / "model"
    write_tokenizer(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    content = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps({**content, "num_attention_heads": 2}))
    return folder


def config_for(model: str | Path, *overrides: str) -> FinetuneConfig:
    settings = [f"model='{model}'", "run_dir=unused", "cutoff_tokens=64", *overrides]
    return load_finetune_config(PRESET, settings)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_tokenizer_without_padding_pads_with_its_end(model: Path) -> None:
    base = open_base_model(config_for(model))
    assert base.tokenizer.pad_token_id == base.tokenizer.eos_token_id
    assert base.dtype == "float32"


def test_cutoff_beyond_the_positions(model: Path) -> None:
    with pytest.raises(
        UserError, match=r"takes 64 positions.*cutoff_tokens is 65.*Set cutoff_tokens=64"
    ):
        open_base_model(config_for(model, "cutoff_tokens=65"))
    content = {"model_type": "gpt2", "n_positions": 32, "vocab_size": VOCAB_SIZE}
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="takes 32 positions"):
        open_base_model(config_for(model))


def test_tokenizer_that_cannot_end(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no end-of-text token"):
        open_base_model(config_for(model))


def test_tokenizer_of_another_model(model: Path) -> None:
    change(model / "config.json", vocab_size=100)
    with pytest.raises(
        UserError, match="the tokenizer has 251 tokens, but the model's vocabulary is 100"
    ):
        open_base_model(config_for(model))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such/folder", "is no folder"),
        ("nobody/nothing", "no such model could be had from the hub.*Give a folder"),
    ],
)
def test_models_that_cannot_be_had(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_base_model(config_for(name))


def test_hash_knows_the_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"one")
    first = model_sha256(model)
    (model / "README.md").write_text("no part of the model")
    assert model_sha256(model) == first
    (model / "model.safetensors").write_bytes(b"two")
    assert model_sha256(model) != first


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/finetune.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_command_line(model: Path, tmp_path: Path) -> None:
    preset = "configs/finetune/arithmetic.yaml"
    shown = run_tool(preset, "optim.lr=5e-4", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert "lr: 0.0005" in shown.stdout and "cutoff_tokens: 256  # default: 2048" in shown.stdout
    wrong = run_tool(preset, "optim.rate=5e-4")
    assert wrong.returncode == 2 and "optim.rate" in wrong.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n')
    settings = [f"model={model}", f"run_dir={tmp_path}/run", f"task.source=['{rows}']"]
    dry = run_tool(preset, *settings, "cutoff_tokens=64", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "1 rows, 1 kept, 1 samples" in dry.stdout and not (tmp_path / "run").exists()
