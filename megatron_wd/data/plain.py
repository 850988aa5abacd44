"""Tokenizing the plain way: what tools/bench/tokenize_speed.py measures `prepare_corpus` against.

Megatron-LM's tools/preprocess_data.py works like this: a pool of processes takes lines of JSON one
by one, encodes each document with the library that the tokenizer comes from, and sends Python lists
back to one IndexedDatasetBuilder. Written anew here, without its options.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

_tokenizer: Any = None  # set once per process


def prepare_plain(source: str, tokenizer: str, output: str, workers: int) -> None:
    """Tokenizes JSON Lines.

    Args:
        source: A .jsonl file with a field `text`.
        tokenizer: Hugging Face folder or SentencePiece .model.
        output: Prefix of the .bin and .idx to write.
        workers: Number of processes.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    _load(tokenizer)
    is_sentencepiece = hasattr(_tokenizer, "piece_to_id")
    size: Any = _tokenizer.vocab_size() if is_sentencepiece else len(_tokenizer)
    # Lists, not tensors, are what Megatron-LM's script passes to the builder too.
    builder: Any = IndexedDatasetBuilder(output + ".bin", dtype=DType.optimal_dtype(size))
    with (
        open(source, encoding="utf-8") as lines,
        multiprocessing.Pool(workers, _load, (tokenizer,)) as pool,
    ):
        for ids in pool.imap(_encode, lines, 32):
            if ids:
                builder.add_document(ids, [len(ids)])
    builder.finalize(output + ".idx")


def _load(path: str) -> None:
    global _tokenizer
    if path.endswith(".model"):
        import sentencepiece

        _tokenizer = sentencepiece.SentencePieceProcessor(model_file=path)
    else:
        import transformers

        transformers.logging.set_verbosity_error()
        _tokenizer = transformers.AutoTokenizer.from_pretrained(path)


def _encode(line: str) -> list[int]:
    text = json.loads(line)["text"]
    if hasattr(_tokenizer, "piece_to_id"):
        ids, eos = _tokenizer.encode(text), _tokenizer.eos_id()
    else:
        encoded = _tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        ids, eos = encoded["input_ids"], _tokenizer.eos_token_id
    return [*ids, eos] if ids else []
