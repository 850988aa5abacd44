"""The road from a checkpoint to a Hugging Face folder."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_checkpoint import (
    VOCAB,
    config_text,
    llama,
    make_run,
    model_config,
    pack_llama,
    run_tool,
    write_checkpoint_description,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from megatron_wd.config import UserError, load_config
from megatron_wd.convert.checkpoint import open_checkpoint
from megatron_wd.convert.dcp import TensorFolder
from megatron_wd.convert.names import tensors_of
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.convert.verify import compare_logits, verify_export

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_names_undo_an_independent_packing(tmp_path, kv_heads, tied):
    config = model_config(tmp_path, kv_heads=kv_heads, tied=tied)
    state = llama(kv_heads, tied).state_dict()
    # Every value of a tensor differs from all others, so any permutation shows.
    state = {
        name: torch.arange(tensor.numel()).reshape(tensor.shape) + 100_000.0 * number
        for number, (name, tensor) in enumerate(state.items())
        if not (tied and name == "lm_head.weight")
    }
    packed = pack_llama(state, config)
    unpacked = {}
    for tensors in tensors_of(config):
        megatron = packed.pop(tensors.megatron[0])
        assert tuple(megatron.shape) == tensors.megatron_shape
        parts = tensors.unpack(megatron, config)
        assert {name: tuple(part.shape) for name, part in parts.items()} == dict(tensors.hf)
        again = tensors.pack(parts, config)
        rows = (
            VOCAB if "embedding" in tensors.megatron[0] or "output" in tensors.megatron[0] else None
        )
        assert torch.equal(again[:rows], megatron[:rows])
        unpacked |= parts
    assert not packed
    assert unpacked.keys() == state.keys()
    assert all(torch.equal(unpacked[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("kv_heads", "tied", "num_ranks"), [(2, False, 2), (1, True, 1), (4, False, 4)]
)
def test_export_loads_in_transformers_with_equal_weights_and_logits(
    tmp_path, kv_heads, tied, num_ranks
):
    run, model = make_run(tmp_path, num_ranks, kv_heads=kv_heads, tied=tied)
    report = export_checkpoint(run, tmp_path / "hf")
    assert (report.step, report.dtype, report.num_files) == (20, "float32", 1)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert isinstance(loaded, LlamaForCausalLM) and loaded.dtype == torch.float32
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.config.rope_parameters["rope_theta"] == 20000.0
    assert loaded.config.rms_norm_eps == 1e-5
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (1, 2)
    assert loaded.generation_config.eos_token_id == 2


def test_export_carries_tokenizer_card_and_versions_of_names(tmp_path):
    run, _ = make_run(tmp_path)
    (run / "provenance.json").write_text(json.dumps({"git_commit": "abc123"}))
    export_checkpoint(run, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("w7 w8")["input_ids"] == [7, 8]
    card = (tmp_path / "hf" / "README.md").read_text()
    for fact in ("runs/tiny", "20 of 100", "5,120", "0.003", "0.7", "abc123"):
        assert fact in card
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_a_checkpoint_moved_away_from_its_run_exports_the_same(tmp_path):
    run, _ = make_run(tmp_path)
    export_checkpoint(run, tmp_path / "a")
    shutil.move(run / "checkpoints" / "iter_0000020", tmp_path / "elsewhere")
    shutil.rmtree(run)
    export_checkpoint(tmp_path / "elsewhere", tmp_path / "b")
    weights = [tmp_path / folder / "model.safetensors" for folder in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_shards_have_an_index_and_the_same_tensors(tmp_path):
    run, model = make_run(tmp_path, num_ranks=2)
    report = export_checkpoint(run, tmp_path / "hf", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert report.num_files == len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.weight_bytes
    for file in files:
        tensors = load_file(tmp_path / "hf" / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, model.state_dict()[name])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        (torch.float32, "bf16", torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
    ],
)
def test_dtype_of_weights_and_config_agree(tmp_path, stored, wanted, expected):
    run, model = make_run(tmp_path, dtype=stored)
    export_checkpoint(run, tmp_path / "hf", dtype=wanted)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == loaded.config.dtype == expected
    weight = model.lm_head.weight.to(torch.bfloat16).to(expected)
    assert torch.equal(loaded.lm_head.weight, weight)


def test_step_chooses_a_checkpoint(tmp_path):
    run, _ = make_run(tmp_path, steps=(10, 20), layers=1)
    assert open_checkpoint(run).step == 20
    assert open_checkpoint(run, step=10).tokens == 10 * 4 * 64
    assert open_checkpoint(run / "checkpoints", step=10).step == 10
    with pytest.raises(UserError, match="no checkpoint of step 15; it has: 10, 20"):
        open_checkpoint(run, step=15)
    with pytest.raises(UserError, match="not the one of --step 10"):
        open_checkpoint(run / "checkpoints" / "iter_0000020", step=10)


def test_reads_what_torch_writes(tmp_path):
    """torch's own writer, plain and with objects beside the tensors."""
    import torch.distributed.checkpoint as dcp

    state = {"a": torch.randn(5, 3), "b": torch.arange(4).bfloat16(), "note": {"x": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    folder = TensorFolder(tmp_path / "dcp")
    assert set(folder.tensors) == {"a", "b"}
    assert torch.equal(folder.read("a"), state["a"])
    assert torch.equal(folder.read("b"), state["b"])


def save_as_rank(rank, world_size, port, config_file, folder):
    """One rank of a run of any layout, saving its share of the initial weights as training does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import start_world, stop_world
    from megatron_wd.models.build import build_model

    # Megatron's writer spawns a process, which imports everything once more; a forked one does too.
    filesystem_async.get_write_results_queue("fork")

    config = load_config(config_file)
    start_world(config.parallel)
    chunks = build_model(config)
    with cpu.cuda_requests_on_cpu():
        state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
        dist_checkpointing.save(state, str(folder))
    stop_world()


@pytest.mark.distributed
def test_megatron_checkpoints_of_every_layout_export_to_the_same_bytes(tmp_path):
    """Written by Megatron itself; initial weights do not depend on the layout."""
    import torch.multiprocessing as mp

    import megatron_wd.models.build  # noqa: F401  before the ranks are forked: once, not in each
    from megatron_wd.backend import cpu

    cpu.install()
    layouts = {"one": {}, "tp2pp2": {"tensor": 2, "pipeline": 2}}
    hashes = set()
    for name, parallel in layouts.items():
        folder = tmp_path / name / "iter_0000003"
        write_checkpoint_description(folder, config_text(), VOCAB)
        text = (folder / "config.yaml").read_text() + f"parallel: {json.dumps(parallel)}\n"
        (folder / "config.yaml").write_text(text)
        world_size = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        arguments = (world_size, port, folder / "config.yaml", folder)
        mp.start_processes(save_as_rank, arguments, nprocs=world_size, start_method="fork")
        export_checkpoint(folder, tmp_path / "hf" / name)
        weights = (tmp_path / "hf" / name / "model.safetensors").read_bytes()
        hashes.add(hashlib.sha256(weights).hexdigest())
    assert len(hashes) == 1
    assert verify_export(folder, tmp_path / "hf" / name).passed


def test_logits_are_compared_by_their_largest_difference():
    ours = torch.zeros(1, 3, 4)
    ours[..., 2] = 10.0
    theirs = ours.clone()
    assert compare_logits(ours, theirs, 1e-4).passed
    theirs[0, 1] = torch.tensor([0.0, 11.0, 10.0, 0.0])
    report = compare_logits(ours, theirs, 1e-4)
    assert not report.passed
    assert report.max_difference == 11.0 and report.relative_difference == pytest.approx(1.1)
    assert report.top1_agreement == pytest.approx(2 / 3)
    assert not compare_logits(ours, theirs * float("nan"), 1e-4).passed


@pytest.mark.parametrize(("tied", "num_ranks", "dtype"), [(False, 2, None), (True, 1, "bf16")])
def test_verify_compares_with_the_megatron_model(tmp_path, tied, num_ranks, dtype):
    run, _ = make_run(tmp_path, num_ranks, tied=tied)
    report = export_checkpoint(run, tmp_path / "hf", dtype=dtype)
    verified = verify_export(run, tmp_path / "hf", dtype=report.dtype)
    assert verified.passed and verified.top1_agreement == 1.0
    assert verified.num_positions == 128 and verified.logits_scale > 1.0
    # An exchange that keeps every shape must show: of the query and of the gate rows.
    file = tmp_path / "hf" / "model.safetensors"
    good = load_file(file)
    for name in ("self_attn.q_proj.weight", "mlp.gate_proj.weight"):
        broken = dict(good)
        key = f"model.layers.1.{name}"
        broken[key] = good[key].roll(1, dims=0).contiguous()
        save_file(broken, file, {"format": "pt"})
        assert not verify_export(run, tmp_path / "hf", dtype=report.dtype).passed


def test_the_command_lines(tmp_path):
    run, _ = make_run(tmp_path)
    out = tmp_path / "hf"
    arguments = ("to-hf", run, out, "--dtype", "bf16", "--max-shard-size", "30KB")
    done = run_tool("convert.py", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["dtype"] == "bfloat16" and report["num_files"] > 1
    again = run_tool("convert.py", *arguments)
    assert again.returncode == 2 and again.stderr.startswith("error: ")
    written = run_tool(
        "generate.py",
        out,
        "--prompt",
        "-",
        "--max-new-tokens",
        4,
        "--greedy",
        "--json",
        text="w7 w8",
    )
    assert written.returncode == 0, written.stderr
    assert len(json.loads(written.stdout)["texts"][0].split()) == 4


@pytest.mark.parametrize("tool", ["convert.py", "generate.py"])
def test_help_does_not_load_torch(tool):
    code = (
        f"import sys, runpy; sys.argv = ['x', '--help']\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        f"try: runpy.run_path({str(ROOT / 'tools' / tool)!r}, run_name='__main__')\n"
        f"except SystemExit: pass\n"
        f"assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
