"""The road from a Hugging Face folder to a checkpoint, and back again."""

import json
import shutil

import pytest
import torch
from megatron_checkpoint import VOCAB, random_model, run_tool, save_hf
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_wd.config import load_config
from megatron_wd.convert.checkpoint import open_checkpoint
from megatron_wd.convert.from_hf import import_folder
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.convert.verify import megatron_logits, verify_export
from megatron_wd.convert.weights import open_weights
from megatron_wd.data.tokenizer import load_tokenizer

SHAPES = [
    *(
        (family, kv_heads, tied)
        for family in ("llama2", "olmo2")
        for kv_heads, tied in ((1, False), (2, True), (4, False))
    ),
    ("gpt2", 4, True),
    ("gpt2", 4, False),
]


def tokens(count=2, length=64):
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1))


def weights_in(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["llama2", "olmo2", "gpt2"])
def test_megatron_itself_loads_an_import_on_any_layout(tmp_path, family):
    """Loaded, run and saved by Megatron at TP2 x PP2: transformers' logits, and the same bits back."""
    model = random_model(family, kv_heads=2, tied=family == "gpt2")
    hf = save_hf(tmp_path / "hf", model)
    import_folder(hf, tmp_path / "mcore")
    out = tmp_path / "iter_0000001"
    shutil.copytree(tmp_path / "mcore", out, ignore=lambda *_: [".metadata", "__0_0.distcp"])
    logits = run_ranks(4, load_run_and_save, str(tmp_path / "mcore"), str(out), tokens().numpy())
    with torch.no_grad():
        expected = model(tokens()).logits
    for found in (torch.from_numpy(logits[2]), torch.from_numpy(logits[3])):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    export_checkpoint(out, tmp_path / "back")
    assert_same_bits(weights_in(tmp_path / "back"), weights_in(hf))


def load_run_and_save(folder, out, token_ids):
    """Logits on the ranks of the last pipeline stage."""
    import queue
    from pathlib import Path

    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import start_world
    from megatron_wd.config import ParallelConfig
    from megatron_wd.convert.shape import read_shape, run_around
    from megatron_wd.models.build import build_model

    config = run_around(read_shape(Path(folder) / "config.yaml")[0])
    config.parallel = ParallelConfig(tensor=2, pipeline=2)
    start_world(config.parallel)
    (model,) = build_model(config)
    filesystem_async._results_queue = queue.Queue()
    ids = torch.from_numpy(token_ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    collected = []

    def forward_step(_data, chunk):
        def keep(output, non_loss_data=False):
            collected.append(tensor_parallel.gather_from_tensor_model_parallel_region(output))
            return output.sum(), {}

        return chunk(ids, positions, None), keep

    with cpu.cuda_requests_on_cpu(), torch.no_grad():
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
        model.load_state_dict(loaded["model"])
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model.eval(),
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=True,
        )
        dist_checkpointing.save({"model": model.sharded_state_dict()}, out)
    return collected[0][..., :VOCAB].float().numpy() if collected else None


@pytest.mark.parametrize(("family", "kv_heads", "tied"), SHAPES)
def test_the_way_back_gives_the_same_bits(tmp_path, family, kv_heads, tied):
    model = random_model(family, kv_heads, tied)
    for dtype in (torch.float32, torch.bfloat16):
        hf = save_hf(tmp_path / "hf", model, dtype)
        import_folder(hf, tmp_path / "mcore", force=True)
        report = export_checkpoint(tmp_path / "mcore", tmp_path / "back", force=True)
        assert report.dtype == str(dtype).removeprefix("torch.")
        assert_same_bits(weights_in(tmp_path / "back"), weights_in(hf))
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", output_loading_info=True, dtype="auto"
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert type(loaded) is type(model) and loaded.dtype == dtype
        source = AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
        with torch.no_grad():
            assert torch.equal(loaded(tokens()).logits, source(tokens()).logits)


@pytest.mark.parametrize(("family", "kv_heads", "tied"), SHAPES)
def test_the_megatron_model_computes_what_transformers_does(tmp_path, family, kv_heads, tied):
    model = random_model(family, kv_heads, tied)
    weights = open_weights(save_hf(tmp_path / "hf", model))
    # On a rank of its own: once a process has had process groups, it cannot fork ranks.
    (ours,) = run_ranks(1, lambda: megatron_logits(weights, tokens()).numpy())
    ours = torch.from_numpy(ours)
    with torch.no_grad():
        theirs = model(tokens()).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_padding_is_zero_and_every_source_reads_alike(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model())
    import_folder(hf, tmp_path / "mcore")
    one, other = open_weights(hf), open_weights(tmp_path / "mcore")
    assert one.names == other.names and one.model == other.model
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        table = other.read(name)
        assert table.shape[0] == 256 and not table[VOCAB:].any() and table[:VOCAB].any()


def test_what_lies_beside_the_tensors(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model())
    import_folder(hf, tmp_path / "mcore")
    run = tmp_path / "run.yaml"
    run.write_text(
        "base: mcore/config.yaml\nrun_dir: runs/x\noptim: {lr: 1.0e-3}\n"
        "data: {tokenizer: t, train: [{path: c}]}\n"
        "train: {steps: 1, global_batch_samples: 1, micro_batch_samples: 1, sequence_tokens: 64}\n"
    )
    model = load_config(run).model
    assert model == open_checkpoint(tmp_path / "mcore").model
    assert (model.rope_theta, model.norm_eps, model.max_positions) == (20000.0, 1e-5, 64)
    assert load_tokenizer(tmp_path / "mcore" / "tokenizer").eos_id == 2
    facts = json.loads((tmp_path / "mcore" / "provenance.json").read_text())
    assert facts["source"] == "hf" and facts["source_architecture"] == "LlamaForCausalLM"
    export_checkpoint(tmp_path / "mcore", tmp_path / "back")
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("w7 w8")["input_ids"] == [7, 8]
    assert "`hf`" in (tmp_path / "back" / "README.md").read_text()


def test_fp16_becomes_fp32_and_shards_are_read(tmp_path):
    model = random_model("olmo2").half()
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    report = import_folder(tmp_path / "hf", tmp_path / "mcore")
    assert report.dtypes == ["float32"] and "fp16" in report.notes[0]
    weights = open_weights(tmp_path / "mcore")
    norm = weights.read("decoder.final_norm.weight")
    assert torch.equal(norm, model.model.norm.weight.float())


def test_old_folders_of_gpt2_and_llama(tmp_path):
    """Names without their prefix, masks and frequencies saved as tensors, a tied output layer twice."""
    hf = save_hf(tmp_path / "gpt2", random_model("gpt2", 4, True))
    file = hf / "model.safetensors"
    state = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    save_file(state | {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}, file, {"format": "pt"})
    assert open_weights(hf).read("decoder.final_norm.bias").shape == (32,)

    hf = save_hf(tmp_path / "llama", random_model("llama2", 2, True))
    file = hf / "model.safetensors"
    state = load_file(file)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": state["model.embed_tokens.weight"].clone(),
    }
    save_file(state | old, file, {"format": "pt"})
    config = json.loads((hf / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (hf / "config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": None})
    )
    assert open_weights(hf).model.rope_theta == 20000.0
    assert "output_layer.weight" not in open_weights(hf).names


def test_verify_works_for_an_import(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model("olmo2", 1))
    import_folder(hf, tmp_path / "mcore")
    export_checkpoint(tmp_path / "mcore", tmp_path / "back", dtype="bf16")
    (verified,) = run_ranks(
        1, lambda: verify_export(tmp_path / "mcore", tmp_path / "back", dtype="bfloat16")
    )
    assert verified.passed


def test_the_command_line(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model())
    done = run_tool("convert.py", "from-hf", hf, tmp_path / "mcore", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["family"] == "llama2"
    again = run_tool("convert.py", "from-hf", hf, tmp_path / "mcore")
    assert again.returncode == 2 and "--force" in again.stderr
    assert run_tool("convert.py", "from-hf", hf, tmp_path / "mcore", "--force").returncode == 0
