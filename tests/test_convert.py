"""The road from a checkpoint to a Hugging Face folder, and what stops on it."""

import hashlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_checkpoint import (
    CONFIG,
    pack_llama,
    write_checkpoint,
    write_checkpoint_description,
    write_dcp,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_wd.config import UserError, load_config
from megatron_wd.convert.checkpoint import open_checkpoint
from megatron_wd.convert.dcp import TensorFolder
from megatron_wd.convert.names import tensors_of
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.convert.verify import compare_logits, verify_export
from megatron_wd.evals.generate import generate

VOCAB = 251
ROOT = Path(__file__).resolve().parent.parent


def llama(kv_heads=2, tied=False, layers=2):
    """A transformers model with random weights everywhere, norms too: all-ones hides mistakes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            tie_word_embeddings=tied,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5).add_(0.1)
    return model.eval()


def config_text(kv_heads=2, tied=False, layers=2):
    return CONFIG.format(kv_heads=kv_heads, tied=str(tied).lower(), layers=layers, vocab=VOCAB)


def model_config(folder, **shape):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_text(**shape))
    return load_config(folder / "config.yaml").model


def make_run(tmp_path, num_ranks=1, steps=(20,), change=None, dtype=None, **shape):
    """A run folder with checkpoints, and the transformers model that they hold."""
    model = llama(**shape)
    tensors = pack_llama(model.state_dict(), model_config(tmp_path / "shape", **shape))
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if change is not None:
        change(tensors)
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in steps:
        folder = checkpoints / f"iter_{step:07d}"
        write_checkpoint(folder, tensors, config_text(**shape), VOCAB, num_ranks)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return tmp_path / "run", model


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


# What stops an export: each leaves no folder behind.


def export_error(tmp_path, source, **options):
    with pytest.raises(UserError) as caught:
        export_checkpoint(source, tmp_path / "hf", **options)
    assert not (tmp_path / "hf").exists()
    assert not list(tmp_path.glob(".hf*"))
    return str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        del tensors["decoder.layers.2.self_attention.linear_proj.weight"]
        tensors["decoder.layers.0.self_attention.q_norm.weight"] = torch.ones(8)
        tensors["decoder.final_norm.weight"] = torch.ones(31)

    run, _ = make_run(tmp_path, change=change)
    message = export_error(tmp_path, run)
    assert "missing: decoder.layers.2.self_attention.linear_proj.weight" in message
    assert "not part of the model: decoder.layers.0.self_attention.q_norm.weight" in message
    assert "decoder.final_norm.weight has [31] instead of [32]" in message


def test_an_output_layer_in_a_tied_model_is_an_extra_tensor(tmp_path):
    def change(tensors):
        tensors["output_layer.weight"] = torch.ones(256, 32)

    run, _ = make_run(tmp_path, tied=True, change=change)
    assert "not part of the model: output_layer.weight" in export_error(tmp_path, run)


def test_half_a_checkpoint_is_refused(tmp_path):
    run, _ = make_run(tmp_path, num_ranks=2)
    folder = run / "checkpoints" / "iter_0000020"
    data = folder / "__1_0.distcp"
    whole = data.read_bytes()

    data.write_bytes(whole[: len(whole) // 2])
    assert "__1_0.distcp has" in export_error(tmp_path, run)
    damaged = bytearray(whole)
    damaged[100:400] = bytes(300)
    data.write_bytes(damaged)
    assert "__1_0.distcp" in export_error(tmp_path, run)
    data.unlink()
    assert "__1_0.distcp is missing" in export_error(tmp_path, run)
    data.write_bytes(whole)
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(index[: len(index) // 2])
    assert ".metadata is damaged" in export_error(tmp_path, run)
    (folder / ".metadata").unlink()
    assert "not a complete checkpoint" in export_error(tmp_path, run)


def test_a_folder_that_does_not_describe_itself_is_refused(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    folder = run / "checkpoints" / "iter_0000020"
    (folder / "tokenizer").rename(tmp_path / "tokenizer")
    assert "--tokenizer" in export_error(tmp_path, run)
    (folder / "config.yaml").unlink()
    assert "no config.yaml" in export_error(tmp_path, run)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    assert "there are: 20" in export_error(tmp_path, run)
    assert "does not exist" in export_error(tmp_path, tmp_path / "nowhere")
    assert "no finished checkpoint" in export_error(tmp_path, tmp_path / "tokenizer")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    from megatron_checkpoint import write_tokenizer

    run, _ = make_run(tmp_path, layers=1)
    write_tokenizer(tmp_path / "large", 300)
    message = export_error(tmp_path, run, tokenizer=tmp_path / "large")
    assert "300 tokens, but the model only 251" in message


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_does_not_run(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    folder = run / "checkpoints" / "iter_0000020"
    trap = tmp_path / "executed"

    index = folder / ".metadata"
    good = index.read_bytes()
    index.write_bytes(pickle.dumps(_Evil(trap)))
    assert "posix.mkdir" in export_error(tmp_path, run)
    # A dotted name, which pickle would follow through the attributes of an allowed module.
    index.write_bytes(b"\x80\x04\x8c\x05torch\x8c\x0bserialize.x\x93.")
    assert "torch.serialize.x" in export_error(tmp_path, run)
    index.write_bytes(good)

    write_dcp(tmp_path / "evil", {"embedding.word_embeddings.weight": _EvilTensor.make(trap)})
    shutil.copy(tmp_path / "evil" / "__0_0.distcp", folder / "__0_0.distcp")
    shutil.copy(tmp_path / "evil" / ".metadata", index)
    with pytest.raises(UserError, match=r"embeddings\.weight cannot be read"):
        TensorFolder(folder).read("embedding.word_embeddings.weight")
    assert not trap.exists()


class _EvilTensor(torch.Tensor):
    """A tensor whose pickle runs a command."""

    @staticmethod
    def make(path):
        tensor = torch.ones(4, 4).as_subclass(_EvilTensor)
        tensor.trap = path
        return tensor

    def chunk(self, *_args, **_kwargs):
        return [self]

    def clone(self):
        return self

    def __reduce_ex__(self, protocol):
        return os.mkdir, (str(self.trap),)


def test_an_index_that_points_outside_is_refused(tmp_path):
    write_dcp(tmp_path / "dcp", {"a": torch.ones(2, 2)})
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="outside the checkpoint"):
        TensorFolder(tmp_path / "dcp")


def test_parts_that_leave_a_hole_are_refused(tmp_path):
    write_dcp(tmp_path / "dcp", {"a": torch.ones(4, 2)}, num_ranks=2)
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata["a"].chunks.pop()
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="parts of tensor a do not make up the whole"):
        TensorFolder(tmp_path / "dcp")


def test_an_existing_folder_is_kept_unless_it_is_an_earlier_export(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(run, out)  # an empty folder is fine
    with pytest.raises(UserError, match="--force"):
        export_checkpoint(run, out)
    (out / "model.safetensors").write_bytes(b"old")
    export_checkpoint(run, out, force=True)
    assert (out / "model.safetensors").stat().st_size > 10_000
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        export_checkpoint(run, out, force=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="does not look like an export"):
        export_checkpoint(run, tmp_path / "precious", force=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "mine"


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


# Text from an export.


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("exported")
    run, model = make_run(tmp_path)
    export_checkpoint(run, tmp_path / "hf")
    return tmp_path / "hf", model


def test_greedy_text_is_the_most_likely_token_each_time(exported):
    folder, model = exported
    (text,) = generate(folder, "w7 w8 w9", max_new_tokens=3, temperature=None)
    tokens = [7, 8, 9]
    for _ in range(3):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text.split() == [f"w{token}" for token in tokens[3:]]


def test_samples_follow_their_seed(exported):
    folder, _ = exported
    options = {"max_new_tokens": 5, "num_samples": 3, "temperature": 1.0}
    first = generate(folder, "w7", seed=1, **options)
    assert len(first) == 3
    assert generate(folder, "w7", seed=1, **options) == first
    assert generate(folder, "w7", seed=2, **options) != first
    assert generate(folder, "", seed=1, **options)


def test_text_longer_than_the_model_is_an_error(exported):
    with pytest.raises(UserError, match="64 tokens that the model"):
        generate(exported[0], "w7 w8", max_new_tokens=63)


def test_a_folder_without_a_model_is_an_error(exported, tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        generate(tmp_path / "nowhere", "w7")
    with pytest.raises(UserError, match=r"no config\.json"):
        generate(tmp_path, "w7")
    shutil.copytree(exported[0], tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be loaded"):
        generate(tmp_path / "copy", "w7")


def run_tool(tool, *arguments, text=None):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)],
        capture_output=True,
        text=True,
        input=text,
    )


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
