"""A tiny run: data with structure to learn, a real tokenizer, a config file."""

from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE = 251  # a prime, so that padding the vocabulary is always at work

CONFIG = """\
run_dir: {folder}/run
model:
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: 96
  num_attention_heads: 4
  num_query_groups: 2
  vocab_size: {vocab_size}
data:
  tokenizer: {folder}/tokenizer
  train: [{{path: {folder}/train}}]
  valid: [{{path: {folder}/valid}}]
optim: {{lr: 3e-3, warmup_steps: 5}}
train: {{steps: 20, global_batch_samples: 8, micro_batch_samples: 4, sequence_tokens: 32}}
evaluate: {{every_steps: 10, samples: 27}}
log: {{every_steps: 1, peak_tflops: 0.1}}
"""


def write_tiny(folder: Path) -> Path:
    """Writes data, tokenizer and config into a folder; returns the config's path."""
    rng = np.random.default_rng(0)
    for name, documents in (("train", 300), ("valid", 60)):
        steps = rng.integers(0, 3, size=(documents, 200))
        write_documents(folder / name, list(np.cumsum(steps, axis=1) % VOCAB_SIZE))
    write_tokenizer(folder / "tokenizer")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder, vocab_size=VOCAB_SIZE))
    return path


def write_documents(prefix: Path, documents: list[np.ndarray], dtype: type = np.uint16) -> None:
    """Writes token documents through Megatron's own builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(f"{prefix}.idx")


def write_tokenizer(folder: Path) -> None:
    """A Hugging Face tokenizer with one id per byte up to the vocabulary size, and an EOS."""
    import tokenizers

    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 1]
    vocabulary = {"</s>": 0} | {char: i + 1 for i, char in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
