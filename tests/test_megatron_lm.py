"""Checkpoints that Megatron's own GPTModel wrote, as Megatron-LM saves them."""

import argparse
import enum
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_checkpoint import VOCAB, write_tokenizer
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_wd.config import UserError
from megatron_wd.convert.checkpoint import open_checkpoint
from megatron_wd.convert.inspection import inspect_folder
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.convert.verify import verify_export
from megatron_wd.convert.weights import open_weights

PADDED = 252  # not what our own padding would make of it
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, 64))


class Backend(enum.Enum):
    """Arguments hold enums, dtypes and functions of programs that are not installed here."""

    auto = 5


def arguments(family, tied):
    """What Megatron-LM would save as `args`."""
    llama = family == "llama2"
    return argparse.Namespace(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        group_query_attention=llama,
        num_query_groups=2 if llama else 1,
        kv_channels=8,
        padded_vocab_size=PADDED,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        seq_length=64,
        norm_epsilon=1e-6,
        normalization="RMSNorm" if llama else "LayerNorm",
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=50000,
        rotary_percent=1.0,
        swiglu=llama,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        bias_gelu_fusion=True,
        untie_embeddings_and_output_weights=not tied,
        qk_layernorm=False,
        num_experts=None,
        multi_latent_attention=False,
        lr=2e-3,
        weight_decay=0.3,
        consumed_train_samples=100,
        attention_backend=Backend.auto,
        params_dtype=torch.float32,
        activation=torch.nn.functional.gelu,
        tokenizer_path=Path("somewhere"),
    )


def write_checkpoint(args, folder, fused_names, per_layer, with_args):
    """One rank's share of a checkpoint; returns the logits of the model."""
    import queue

    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import seed_step, start_world
    from megatron_wd.config import ParallelConfig

    size = int(os.environ["WORLD_SIZE"])
    world = start_world(ParallelConfig(tensor=size))
    seed_step(0, 0)
    filesystem_async._results_queue = queue.Queue()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=size,
    )
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if not fused_names:
        spec.submodules.sharded_state_dict_keys_map = {}
    ids = torch.from_numpy(TOKENS)
    with cpu.cuda_requests_on_cpu(), torch.no_grad():
        model = GPTModel(
            config,
            spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
        ).eval()
        for number, parameter in enumerate(model.parameters()):
            sharded = getattr(parameter, "tensor_model_parallel", False)
            torch.manual_seed(100 * number + world.tensor_rank * sharded)
            parameter.normal_(std=0.4).add_(0.1)
        logits = model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        metadata = {"non_homogeneous_layers": per_layer}
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        if with_args:
            state |= {"args": args, "iteration": 7, "checkpoint_version": 3.0}
        dist_checkpointing.save(state, folder)
    return logits[..., :VOCAB].float().numpy()


def make(tmp_path, family, tied=False, ranks=1, fused_names=True, per_layer=False, with_args=True):
    folder = tmp_path / "mlm" / "iter_0000007"
    folder.mkdir(parents=True)
    write_tokenizer(tmp_path / "tokenizer", VOCAB)
    args = arguments(family, tied)
    logits = run_ranks(
        ranks, write_checkpoint, args, str(folder), fused_names, per_layer, with_args
    )
    return folder, torch.from_numpy(logits[0])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "tied", "ranks", "fused_names", "per_layer"),
    [
        ("llama2", False, 2, True, False),
        ("llama2", True, 1, False, True),
        ("gpt2", True, 2, False, False),
        ("gpt2", False, 1, True, True),
    ],
)
def test_exports_compute_what_gpt_model_does(tmp_path, family, tied, ranks, fused_names, per_layer):
    folder, expected = make(tmp_path, family, tied, ranks, fused_names, per_layer)
    weights = open_weights(folder)
    assert (weights.kind, weights.model.family) == ("megatron_lm", family)
    export_checkpoint(folder, tmp_path / "hf", tokenizer=tmp_path / "tokenizer")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        found = loaded(torch.from_numpy(TOKENS)).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # On a rank of its own: once a process has had process groups, it cannot fork ranks.
    (verified,) = run_ranks(1, verify_export, folder, tmp_path / "hf")
    assert verified.passed and verified.relative_difference < 1e-5
    facts = inspect_folder(folder.parent.parent / "mlm" / "iter_0000007")
    assert (facts["step"], facts["tokens"], facts["learning_rate"]) == (7, 6400, 2e-3)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "Megatron-LM" in card and "6,400" in card


@pytest.mark.distributed
def test_only_the_chunks_of_a_layer_are_read(tmp_path):
    folder, _ = make(tmp_path, "llama2")
    from megatron_wd.convert.dcp import TensorFolder

    tensors = TensorFolder(folder)
    name = "decoder.layers.mlp.linear_fc2.weight"
    whole = tensors.read(name)
    assert whole.shape == (3, 32, 48)
    assert torch.equal(tensors.read(name, layer=1), whole[1])
    chunks = {chunk.offsets[0]: chunk for chunk in tensors.tensors[name].chunks}
    data = bytearray((folder / chunks[0].file).read_bytes())
    start = chunks[0].start_bytes
    data[start : start + chunks[0].length_bytes] = bytes(chunks[0].length_bytes)
    (folder / chunks[0].file).write_bytes(data)
    assert torch.equal(TensorFolder(folder).read(name, layer=1), whole[1])
    with pytest.raises(UserError, match="cannot be read"):
        TensorFolder(folder).read(name, layer=0)


@pytest.mark.distributed
def test_a_plain_core_save_takes_its_shape_from_config_yaml(tmp_path):
    folder, expected = make(tmp_path, "gpt2", tied=True, with_args=False)
    with pytest.raises(UserError, match=r"no config\.yaml"):
        open_checkpoint(folder)
    (folder / "config.yaml").write_text(
        "model: {family: gpt2, num_layers: 3, hidden_size: 32, ffn_hidden_size: 48,\n"
        "  num_attention_heads: 4, vocab_size: 251, max_positions: 64, norm_eps: 1.0e-6,\n"
        "  tie_embeddings: true}\n"
    )
    shutil.copytree(tmp_path / "tokenizer", folder / "tokenizer")
    export_checkpoint(folder, tmp_path / "hf")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.from_numpy(TOKENS))
    assert (found.logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (
        load_file(tmp_path / "hf" / "model.safetensors")["transformer.wte.weight"].shape[0] == 251
    )


REFUSED = {
    "qk_layernorm": True,
    "num_experts": 8,
    "multi_latent_attention": True,
    "rotary_percent": 0.5,
    "add_qkv_bias": True,
    "use_rope_scaling": True,
    "normalization": "LayerNorm",
    "position_embedding_type": Backend.auto,
    "layernorm_epsilon": 1e-3,
}


def with_arguments(folder, args):
    """As Megatron-LM wrote them before: in a file of their own."""
    folder.mkdir(exist_ok=True)
    torch.save({"args": args, "iteration": 7}, folder / "common.pt")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_change_the_computation_are_refused(tmp_path, name):
    args = arguments("llama2", False)
    assert open_checkpoint(with_arguments(tmp_path / "iter_0000007", args)).model.kv_heads == 2
    setattr(args, name, REFUSED[name])
    with pytest.raises(UserError, match=name.replace("layernorm_", "norm_")):
        open_checkpoint(with_arguments(tmp_path / "iter_0000007", args))


def test_the_exact_gelu_is_refused(tmp_path):
    args = arguments("gpt2", True)
    args.bias_gelu_fusion = False
    with pytest.raises(UserError, match="bias_gelu_fusion is False"):
        open_checkpoint(with_arguments(tmp_path / "iter_0000007", args))


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_does_not_run(tmp_path):
    trap = tmp_path / "executed"
    args = arguments("llama2", False)
    args.harmless = _Evil(trap)
    folder = with_arguments(tmp_path / "iter_0000007", args)
    assert open_checkpoint(folder).model.num_layers == 3
    args.num_layers = _Evil(trap)
    with pytest.raises(UserError, match="num_layers is <mkdir>; expected int"):
        open_checkpoint(with_arguments(folder, args))
    (folder / "common.pt").write_bytes((folder / "common.pt").read_bytes()[:500])
    with pytest.raises(UserError, match=r"common\.pt is damaged"):
        open_checkpoint(folder)
    assert not trap.exists()


def test_the_old_format_is_named(tmp_path):
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(UserError, match="old format"):
        open_checkpoint(tmp_path / "iter_0000007")
