"""A dry run finds what a start would find, on any number of ranks, and its memory is what is held."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from megatron_wd.config import UserError, load_config, num_parameters
from megatron_wd.train.memory import pipeline_memory

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
PRETRAIN = ROOT / "launch" / "pretrain.sh"
PARTS = {"base", "models", "studies", "finetune", "evaluate"}  # folders of what is no run by itself
RUNS = [p for p in CONFIGS.rglob("*.yaml") if not PARTS & set(p.relative_to(ROOT).parts)]
LLAMA2_4B = "configs/plasticity/llama2_4b_20x_4096_ranks.yaml"


def intended_ranks(path: Path) -> int | None:
    """The number in a config's first line, `# Ranks: N`."""
    match = re.match(r"# Ranks: (\d+)\n", path.read_text("utf-8"))
    return int(match[1]) if match else None


def dry_runs(cases: list[tuple[str, list[str], int | None]]) -> list[dict[str, Any] | str]:
    """Record, table size and output of each (config, overrides, ranks); the message of a UserError."""
    from megatron_wd.train.dry_run import as_record, dry_run, run

    answers: list[dict[str, Any] | str] = []
    for path, overrides, ranks in cases:
        output, errors = io.StringIO(), io.StringIO()
        try:
            config = load_config(path, overrides)
            result = dry_run(config, ranks or config.parallel.model_ranks)
            if not path.startswith(str(CONFIGS)):
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                    assert run(config, ranks) == 0
        except UserError as error:
            answers.append(str(error))
            continue
        record = as_record(result)
        record["values"] = sum(math.prod(row.shape) for row in result.rules.values())
        answers.append({**record, "output": output.getvalue(), "errors": errors.getvalue()})
    return answers


def test_every_shipped_config_fits_its_ranks_and_their_memory() -> None:
    # The one for thousands of ranks has a test of its own.
    cases = [(str(path), [], intended_ranks(path)) for path in RUNS if path != ROOT / LLAMA2_4B]
    (answers,) = run_ranks(1, dry_runs, cases)
    for (path, _, ranks), answer in zip(cases, answers, strict=True):
        assert isinstance(answer, dict), f"{path}: {answer}"
        model = load_config(path).model
        padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size
        padding *= 1 if model.tie_embeddings else 2
        # The stages together have every parameter once; a tied table's second copy is no parameter.
        assert answer["values"] == num_parameters(model) + padding, path
        assert max(stage["total_bytes"] for stage in answer["stages"]) < 60e9, path
        assert ranks is None or answer["ranks"] == ranks
    papers = [p for p in RUNS if {"plasticity", "lr_laws"} & set(p.relative_to(ROOT).parts)]
    assert papers and all(map(intended_ranks, papers))


def test_thousands_of_ranks_take_one_process_and_seconds() -> None:
    command = ["bash", str(PRETRAIN), LLAMA2_4B, "--dry-run", "--ranks", "4096", "--json"]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert intended_ranks(ROOT / LLAMA2_4B) == 4096
    record = json.loads(result.stdout)
    layout = record["layout"]
    assert (layout["tensor"], layout["pipeline"], layout["virtual_pipeline"]) == (4, 4, 7)
    assert layout["data"] == 4096 // 16
    # A block: (4096 x (4096 + 2 x 512) + 4096 x 4096 + 3 x 4096 x 7792) / 4 and two norms of 4096.
    block = (4096 * 5120 + 4096 * 4096 + 3 * 4096 * 7792) // 4 + 2 * 4096
    table = 32000 * 4096 // 4
    counts = [stage["parameters"] for stage in record["stages"]]
    assert counts == [7 * block + table, 7 * block, 7 * block, 7 * block + table + 4096]
    first = record["stages"][0]
    assert first["optimizer_bytes"] == counts[0] * 12 // 256
    assert "data/fineweb_edu/train" in record["warnings"][0]


def test_ranks_that_do_not_fit_are_told_as_by_a_start() -> None:
    from megatron_wd.train.dry_run import dry_run

    config = load_config(ROOT / LLAMA2_4B)
    for ranks, expected in (
        (24, "24 processes cannot hold the layout"),
        (48, "not a multiple of train.micro_batch_samples"),
        (131_072, "virtual_pipeline 7 needs the micro-batches"),
    ):
        with pytest.raises(UserError, match=expected):
            dry_run(config, ranks)


def torchrun_workers(count: int) -> list[tuple[int, str]]:
    """Exit code and output of the first two of torchrun's processes."""
    main = runpy.run_path(str(PRETRAIN))["main"]
    answers = []
    for rank in "01":
        os.environ.update(RANK=rank, WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = main(["configs/tiny.yaml", "--dry-run", "--json"])
        answers.append((code, output.getvalue()))
    return answers


def test_under_torchrun_one_process_answers_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (answers,) = run_ranks(1, torchrun_workers, 4)
    assert [code for code, _ in answers] == [0, 0]
    assert json.loads(answers[0][1])["ranks"] == 4 and answers[1][1] == ""


def test_what_is_on_the_machine_is_checked(tiny: Path) -> None:
    folder = tiny.parent
    (folder / "half.bin").write_bytes(b"12")
    (folder / "cut.idx").write_bytes((folder / "train.idx").read_bytes())
    (folder / "cut.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])
    elsewhere = "data.tokenizer=elsewhere/tokenizer"
    cases = [
        (
            str(tiny),
            ["train.z_loss=1e-4", "init_from=elsewhere/model", "train.micro_batch_samples=2"],
            4,
        ),
        (str(tiny), [elsewhere], 1),
        (str(tiny), [elsewhere, f"data.train.0.path={folder}/half"], 1),
        (str(tiny), [elsewhere, f"data.train.0.path={folder}/cut"], 1),
        (str(tiny), ["data.valid.0.path=elsewhere/valid", "model.vocab_size=9"], 1),
        (str(tiny), ["evaluate.samples=1000000"], 1),
        (str(tiny), ["precision=fp8", "parallel.context=2"], 2),
    ]
    (answers,) = run_ranks(1, dry_runs, cases)
    whole, no_tokenizer, half, cut, small, evaluation, fp8 = answers
    assert whole["tokens_in_data"] == 300 * 200
    assert "60,000 tokens" in whole["output"] and "z-loss 0.0001" in whole["output"]
    assert "weights     from elsewhere/model" in whole["output"]
    assert "4 pretended ranks" in whole["output"] and "largest: stage 0" in whole["output"]
    assert whole["warnings"] == ["not on this machine, so not checked: elsewhere/model"]
    assert no_tokenizer["tokens_in_data"] is None
    assert no_tokenizer["errors"] == (
        "warning: not on this machine, so not checked: elsewhere/tokenizer\n"
    )
    assert "half.idx does not exist" in half
    assert "cut.bin has" in cut and "truncated" in cut
    assert "has 251 ids, more than" in small
    assert "evaluate.samples=1000000" in evaluation
    assert fp8["warnings"][0].startswith("precision=fp8 and parallel.context=2 cannot run here")


def test_context_ranks_share_optimizer_and_sequence() -> None:
    path = ROOT / "configs" / "tiny.yaml"
    (one,) = pipeline_memory(load_config(path), 2)
    (two,) = pipeline_memory(load_config(path, ["parallel.context=2"]), 2)
    assert two.optimizer_bytes == one.optimizer_bytes
    assert two.activation_bytes * 2 == one.activation_bytes
    alone = load_config(path, ["parallel.distributed_optimizer=false"])
    assert pipeline_memory(alone, 2)[0].optimizer_bytes == 2 * one.optimizer_bytes


# Against what a real rank holds


def held_bytes(path: str, overrides: list[str]) -> dict[str, int]:
    """What one real rank holds after an update, by the names of `StageMemory`."""
    import torch

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import start_world
    from megatron_wd.models.build import build_model, distribute_model
    from megatron_wd.optim.build import build_optimizer
    from megatron_wd.optim.matrices import gather_shapes
    from megatron_wd.optim.rules import resolve_rules
    from megatron_wd.train.step import prepare_schedules

    config = load_config(path, overrides)
    start_world(config.parallel)
    built = build_model(config)
    activations = activation_bytes(built[0], config) if len(built) == 1 else 0
    model = distribute_model(built, config)
    rated = build_optimizer(model, config, resolve_rules(gather_shapes(model), config))
    rated.set_rates(1)
    optimizer = rated.megatron
    prepare_schedules(model, optimizer)
    with cpu.cuda_requests_on_cpu():
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    optimizer_state = [
        value
        for part in parts
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    own = {p.data_ptr() for chunk in model for p in chunk.parameters()}
    masters = [
        p
        for part in parts
        for group in part.optimizer.param_groups
        for p in group["params"]
        if p.dtype == torch.float32 and config.precision != "fp32" and p.data_ptr() not in own
    ]
    buffers = [buffer for chunk in model for buffer in chunk.buffers]  # type: ignore[attr-defined]
    return {
        "weights": sum(p.nbytes for chunk in model for p in chunk.parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(value.nbytes for value in optimizer_state + masters),
        "activations": activations,
    }


def activation_bytes(chunk: Any, config: Any) -> int:
    """Storages that the forward pass of a micro-batch saves for the backward pass."""
    import torch

    shape = (config.train.micro_batch_samples, config.train.sequence_tokens)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.arange(shape[1]).expand(shape)
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        chunk(input_ids=ids, position_ids=positions, attention_mask=None, labels=ids)
    return sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in weights)


@pytest.mark.parametrize("name", ["tiny", "tiny_olmo2", "tiny_gpt2"])
def test_memory_is_what_a_rank_holds(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    overrides = [
        "precision=bf16",
        "model.num_layers=6",
        "model.hidden_size=256",
        "model.ffn_hidden_size=704",
        "train.micro_batch_samples=4",
    ]
    config = load_config(path, overrides)
    (expected,) = pipeline_memory(config, 2)
    for held in run_ranks(2, held_bytes, str(path), overrides):
        assert held["weights"] == expected.weight_bytes
        # Megatron pads its buffers, and what a rank has of them.
        assert held["gradients"] == pytest.approx(expected.gradient_bytes, rel=0.01)
        assert held["optimizer"] == pytest.approx(expected.optimizer_bytes, rel=0.01)
        tokens = config.train.micro_batch_samples * config.train.sequence_tokens
        # Nothing of the softmax's fp32 copies is kept, and ours keeps attention's output twice.
        estimate = expected.activation_bytes - 8 * tokens * config.model.padded_vocab_size
        assert held["activations"] == pytest.approx(estimate, rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muon_keeps_one_mean_of_its_matrices(precision: str) -> None:
    path = CONFIGS / "tiny.yaml"
    overrides = [
        *("optim.optimizer=muon", "optim.matrix_lr=0.01", "parallel.distributed_optimizer=false"),
        *(f"precision={precision}", "parallel.tensor=2"),
    ]
    (expected,) = pipeline_memory(load_config(path, overrides), 2)
    for held in run_ranks(2, held_bytes, str(path), overrides):
        assert held["optimizer"] == expected.optimizer_bytes
