"""What stops an import: one message that names the thing, nothing executed, no folder left behind."""

import json
import pickle
import shutil

import pytest
import torch
from megatron_checkpoint import random_model, save_hf
from safetensors.torch import load_file, save_file

from megatron_wd.config import UserError
from megatron_wd.convert import output_folder
from megatron_wd.convert.from_hf import import_folder
from megatron_wd.convert.hf_config import shape_from_fields
from megatron_wd.convert.to_hf import export_checkpoint


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of each family, and one in shards."""
    folder = tmp_path_factory.mktemp("sources")
    for family in ("llama2", "olmo2", "gpt2"):
        save_hf(folder / family, random_model(family, 4, False), tokenizer=False)
    random_model().save_pretrained(folder / "shards", max_shard_size="20KB")
    return folder


def import_error(tmp_path, source):
    with pytest.raises(UserError) as caught:
        import_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    return str(caught.value)


def copy(sources, tmp_path, name="llama2"):
    return shutil.copytree(sources / name, tmp_path / "hf")


FIELDS = [
    ("llama2", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'll"),
    (
        "llama2",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.type is 'linear'",
    ),
    ("llama2", {"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor is 2.0"),
    ("llama2", {"rope_theta": 1e6}, "rope_parameters.rope_theta is 20000.0, but rope_theta is"),
    ("llama2", {"attention_bias": True}, "attention_bias is True"),
    ("llama2", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama2", {"sliding_window": 4096}, "sliding_window is 4096"),
    ("olmo2", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("llama2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama2", {"pretraining_tp": 2}, "pretraining_tp is 2"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ("llama2", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
    ("llama2", {"frobnicate": 3}, "frobnicate (3) is an unknown field"),
    ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassific"),
    ("llama2", {"model_type": "mistral"}, "model_type 'mistral' is not supported"),
    ("llama2", {"num_key_value_heads": 3}, "model.num_query_groups 3"),
    ("llama2", {"hidden_size": "32"}, "hidden_size is '32'; expected int"),
    ("olmo2", {"attention_bias": True}, "attention_bias is True"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
    ("gpt2", {"rope_theta": 1e4}, "rope_theta (10000.0) is an unknown field"),
]


@pytest.mark.parametrize(("family", "change", "said"), FIELDS)
def test_fields_that_change_the_computation_are_refused_by_name(
    sources, tmp_path, family, change, said
):
    hf = copy(sources, tmp_path, family)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | change))
    message = import_error(tmp_path, hf)
    assert said in message and "config.json" in message


def test_what_transformers_takes_where_fields_are_missing():
    shape = {"vocab_size": 251, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 48, "num_attention_heads": 4}
    llama = shape_from_fields({"model_type": "llama", **shape})
    assert (llama.norm_eps, llama.rope_theta, llama.kv_heads) == (1e-6, 10000.0, 4)
    assert shape_from_fields({"model_type": "olmo2", **shape}).norm_eps == 1e-5
    gpt2 = shape_from_fields(
        {"model_type": "gpt2", "vocab_size": 251, "n_embd": 32, "n_layer": 2, "n_head": 4}
    )
    assert gpt2.tie_embeddings and gpt2.ffn_hidden_size == 128 and gpt2.max_positions == 1024
    with pytest.raises(UserError, match="hidden_size is missing"):
        shape_from_fields({"model_type": "llama", "vocab_size": 251})


def test_files_that_are_cut_off_or_damaged(sources, tmp_path):
    hf = copy(sources, tmp_path)
    file = hf / "model.safetensors"
    whole = file.read_bytes()
    for length, said in ((len(whole) - 4, "was cut off"), (100, "cut off"), (3, "cut off")):
        file.write_bytes(whole[:length])
        assert said in import_error(tmp_path, hf)
    file.write_bytes(whole + b"more")
    assert "is damaged" in import_error(tmp_path, hf)
    file.write_bytes(whole[:8] + b"!" * 40 + whole[48:])
    assert "header is damaged" in import_error(tmp_path, hf)
    (hf / "config.json").write_text("{")
    assert "config.json is damaged" in import_error(tmp_path, hf)


def test_tensors_that_do_not_fit_are_named(sources, tmp_path):
    hf = copy(sources, tmp_path)
    file = hf / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.norm.weight"] = torch.ones(31)
    save_file(state, file, {"format": "pt"})
    message = import_error(tmp_path, hf)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "not part of the model: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight has [31] instead of [32]" in message
    state["model.norm.weight"] = torch.ones(32, dtype=torch.float64)
    save_file(state, file, {"format": "pt"})
    assert "model.norm.weight has dtype F64" in import_error(tmp_path, hf)


def test_a_tied_model_with_another_output_layer_is_refused(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model(tied=True))
    file = hf / "model.safetensors"
    state = load_file(file)
    head = state["model.embed_tokens.weight"].clone()
    head[7, 7] += 1
    save_file(state | {"lm_head.weight": head}, file, {"format": "pt"})
    assert "lm_head.weight differs from model.embed_tokens" in import_error(tmp_path, hf)


def test_shards_are_complete_or_refused(sources, tmp_path):
    hf = copy(sources, tmp_path, "shards")
    index = hf / "model.safetensors.index.json"
    text = index.read_text()
    content = json.loads(text)
    name, shard = "model.norm.weight", content["weight_map"]["model.norm.weight"]
    content["weight_map"]["model.absent.weight"] = shard
    index.write_text(json.dumps(content))
    assert "names tensor model.absent.weight, but" in import_error(tmp_path, hf)
    del content["weight_map"]["model.absent.weight"], content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert f"holds tensor {name}, which" in import_error(tmp_path, hf)
    content["weight_map"][name] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    assert "'../elsewhere.safetensors', which is no" in import_error(tmp_path, hf)
    index.write_text(text)
    (hf / shard).rename(tmp_path / "away")
    assert f"{shard} is missing" in import_error(tmp_path, hf)
    index.unlink()
    assert "no model.safetensors.index.json" in import_error(tmp_path, hf)


def test_other_folders(sources, tmp_path):
    hf = copy(sources, tmp_path)
    (hf / "model.safetensors").unlink()
    assert "has no weights" in import_error(tmp_path, hf)
    trap = tmp_path / "executed"
    (hf / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(trap)))
    assert "pytorch_model.bin, a pickle" in import_error(tmp_path, hf)
    assert not trap.exists()
    (tmp_path / "empty").mkdir()
    assert "no Hugging Face folder" in import_error(tmp_path, tmp_path / "empty")
    assert "does not exist" in import_error(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a Hugging Face folder already"):
        export_checkpoint(sources / "llama2", tmp_path / "out")


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_what_is_in_the_way_stays(sources, tmp_path, monkeypatch):
    out = tmp_path / "out"
    import_folder(sources / "llama2", out)
    with pytest.raises(UserError, match="--force"):
        import_folder(sources / "llama2", out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        import_folder(sources / "llama2", out, force=True)
    monkeypatch.setattr(
        output_folder.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1)
    )
    with pytest.raises(UserError, match="free, but the result takes"):
        import_folder(sources / "llama2", tmp_path / "full")
    assert not (tmp_path / "full").exists()
