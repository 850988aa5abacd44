"""Tiny real tokenizers, trained in the test: a SentencePiece model and a Hugging Face byte-level BPE."""

import io
import json
import os
from pathlib import Path

import pytest

SENTENCES = [
    "The quick brown fox jumps over the lazy dog and runs away from the bears.",
    "In the beginning was the word, and the word was followed by 1234 other words.",
    "def encode(self, text):\n    return [self.ids[piece] for piece in text]\n",
    "Großmutter saß im Café; naïve Menschen lasen über die Straße.",
    "He said </s> and <s> and then <|endoftext|> as if it were text.",
] * 20


def sentencepiece_model(path: Path, **options: object) -> Path:
    import sentencepiece

    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 480,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, **(settings | options)
    )
    path.write_bytes(model.getvalue())
    return path


def huggingface_folder(path: Path, **config: object) -> Path:
    """A byte-level BPE whose EOS is `<|endoftext|>`, and which would add it in front (as a BOS)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.enable_truncation(8)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return path


def real_data() -> Path:
    """Folder with corpora/ and tokenizers/, for tests on real data."""
    folder = os.environ.get("MEGATRON_WD_DATA")
    if not folder or not Path(folder, "tokenizers").is_dir():
        pytest.skip("MEGATRON_WD_DATA names no folder with tokenizers/")
    return Path(folder)
