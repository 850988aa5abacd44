"""Builds little checkpoints for the converter's tests, independently of the converter.

The packing is written head by head from Megatron's definition, and the folder as torch's own
checkpoint package writes it, so that a mistake of the converter does not cancel out.
"""

import io
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Olmo2Config

from megatron_wd.config import load_config

VOCAB = 251

CONFIG = """
run_dir: runs/tiny
model:
  num_layers: {layers}
  hidden_size: 32
  ffn_hidden_size: 48
  num_attention_heads: 4
  num_query_groups: {kv_heads}
  vocab_size: {vocab}
  norm_eps: 1.0e-5
  rope_theta: 20000.0
  tie_embeddings: {tied}
data:
  tokenizer: tokenizer
  train: [{{path: corpus}}]
optim: {{lr: 0.003, weight_decay: 0.7}}
train:
  steps: 100
  global_batch_samples: 4
  micro_batch_samples: 2
  sequence_tokens: 64
"""


def pack_llama(state: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """Megatron's tensors from those of transformers' LlamaForCausalLM."""
    heads, groups, size = model.num_attention_heads, model.kv_heads, model.head_size
    packed = {}
    for layer in range(model.num_layers):
        hf = f"model.layers.{layer}."
        attention, mlp = f"decoder.layers.{2 * layer}.", f"decoder.layers.{2 * layer + 1}."
        rows = []
        for group in range(groups):
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                q_weight = state[hf + "self_attn.q_proj.weight"]
                rows.append(q_weight[head * size : (head + 1) * size])
            for kind in ("k", "v"):
                weight = state[hf + f"self_attn.{kind}_proj.weight"]
                rows.append(weight[group * size : (group + 1) * size])
        packed[attention + "self_attention.linear_qkv.weight"] = torch.cat(rows)
        packed[attention + "self_attention.linear_qkv.layer_norm_weight"] = state[
            hf + "input_layernorm.weight"
        ]
        packed[attention + "self_attention.linear_proj.weight"] = state[
            hf + "self_attn.o_proj.weight"
        ]
        packed[mlp + "mlp.linear_fc1.layer_norm_weight"] = state[
            hf + "post_attention_layernorm.weight"
        ]
        packed[mlp + "mlp.linear_fc1.weight"] = torch.cat(
            [state[hf + "mlp.gate_proj.weight"], state[hf + "mlp.up_proj.weight"]]
        )
        packed[mlp + "mlp.linear_fc2.weight"] = state[hf + "mlp.down_proj.weight"]
    packed["decoder.final_norm.weight"] = state["model.norm.weight"]
    padding = torch.full((model.padded_vocab_size - model.vocab_size, model.hidden_size), -99.0)
    packed["embedding.word_embeddings.weight"] = torch.cat(
        [state["model.embed_tokens.weight"], padding]
    )
    if not model.tie_embeddings:
        packed["output_layer.weight"] = torch.cat([state["lm_head.weight"], padding])
    return packed


def write_dcp(folder: Path, tensors: dict[str, torch.Tensor], num_ranks: int = 1) -> None:
    """Writes a torch.distributed.checkpoint folder as `num_ranks` tensor-parallel ranks would.

    Every tensor is cut into as many parts as there are ranks, on axis 0 or, where that does not
    divide, axis 1; rank r writes part r into its own file, behind some bytes of fp8 state.
    """
    folder.mkdir(parents=True)
    files = [io.BytesIO() for _ in range(num_ranks)]
    metadata = Metadata({}, storage_data={}, version="1.0.0")

    def store(rank: int, index: MetadataIndex, value: object) -> None:
        start = files[rank].tell()
        torch.save(value, files[rank])
        length = files[rank].tell() - start
        metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", start, length)

    extra = "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"
    metadata.state_dict_metadata[extra] = BytesStorageMetadata()
    store(0, MetadataIndex(extra), io.BytesIO(b"scales"))
    for name, tensor in tensors.items():
        axis = 0 if tensor.shape[0] % num_ranks == 0 else 1
        chunks, start = [], 0
        for rank, part in enumerate(tensor.chunk(num_ranks, dim=axis)):
            offsets = [0] * tensor.dim()
            offsets[axis] = start
            start += part.shape[axis]
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            store(rank, MetadataIndex(name, offsets), part.clone())
        properties = TensorProperties.create_from_tensor(tensor)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    for rank, file in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of `vocab` words (w3, w4, ...) with start and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_checkpoint(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: str,
    vocab: int,
    num_ranks: int = 1,
) -> None:
    """A whole checkpoint folder: tensors, a bit of optimizer state, config and tokenizer."""
    optimizer = {"optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(4, 4)}
    write_dcp(folder, {**tensors, **optimizer}, num_ranks)
    write_checkpoint_description(folder, config, vocab)


def write_checkpoint_description(folder: Path, config: str, vocab: int) -> None:
    """What lies beside the tensors: config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    write_tokenizer(folder / "tokenizer", vocab)


def random_model(family="llama2", kv_heads=2, tied=False, layers=2, **changes):
    """A transformers model with random weights everywhere, norms too: all-ones hides mistakes."""
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=layers,
            n_head=4,
            n_inner=48,
            n_positions=64,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
        )
    else:
        kind = LlamaConfig if family == "llama2" else Olmo2Config
        config = kind(
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
            bos_token_id=1,
            eos_token_id=2,
        )
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5).add_(0.1)
    return model.eval()


def llama(kv_heads=2, tied=False, layers=2):
    """A small LlamaForCausalLM."""
    return random_model("llama2", kv_heads, tied, layers)


def save_hf(folder, model, dtype=None, tokenizer=True):
    """A Hugging Face folder as transformers writes it, with a tokenizer."""
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder, VOCAB)
    return folder


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


def run_tool(tool, *arguments, text=None):
    """Runs a command line of tools/ to its end."""
    return subprocess.run(
        [
            sys.executable,
            str(Path(__file__).resolve().parent.parent / "tools" / tool),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        input=text,
    )
