import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers_for_tests import (
    SENTENCES,
    huggingface_folder,
    real_data,
    sentencepiece_model,
)

from megatron_wd.config import UserError
from megatron_wd.data.special_tokens import probes
from megatron_wd.data.tokenizer import Tokenizer, load_tokenizer

SPELLED = ["<s>", "</s>", "<unk>", "<|endoftext|>", "<|pad|>", "a</s>b", " <|endoftext|> "]
TEXTS = [*SENTENCES[:5], *probes(SPELLED), "", " ", "x" * 3000, "\0\x01\r\n", "日本語 🏳️‍🌈 \u0301e"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    huggingface_folder(root / "hf")
    sentencepiece_model(root / "sp.model")
    sentencepiece_model(
        root / "plain.model", add_dummy_prefix=False, user_defined_symbols=["<sep>"]
    )
    sentencepiece_model(root / "nmt.model", normalization_rule_name="nmt_nfkc",
                        remove_extra_whitespaces=True)  # fmt: skip
    return root


NAMES = ["hf", "sp.model", "plain.model", "nmt.model"]


def lists(arrays: list[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@pytest.mark.parametrize("name", NAMES)
def test_fast_and_reference_agree_and_no_special_token_comes_out_of_text(
    folder: Path, name: str
) -> None:
    tokenizer = load_tokenizer(folder / name)
    reference = lists(tokenizer.encode_batch(TEXTS))
    assert tokenizer.use_fast(SENTENCES) is None and tokenizer.is_fast
    assert lists(tokenizer.encode_batch(TEXTS)) == reference
    assert tokenizer.special_ids and tokenizer.eos_id in tokenizer.special_ids.values()
    for ids in reference:  # in particular no BOS and no EOS at the ends
        assert not set(ids) & set(tokenizer.special_ids.values())
    assert max(map(max, filter(None, reference))) < tokenizer.vocab_size
    assert len(reference[SPELLED.index("<s>")]) > 1


@pytest.mark.parametrize("name", ["hf", "plain.model"])
def test_decoding_gives_the_text_back(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder / name)
    texts = [text for text in TEXTS if "\u2581" not in text]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


@pytest.mark.parametrize("name", NAMES)
def test_saved_folder_loads_in_transformers_and_here_with_the_same_ids(
    folder: Path, name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(folder / name)
    tokenizer.save(tmp_path)
    texts = [t for t in TEXTS if not any(s in t for s in [*SPELLED, "<sep>", "<0x0A>"])]
    assert len(texts) > 10
    expected = lists(tokenizer.encode_batch(texts))
    for model_type in (None, "llama"):
        if model_type:  # what an exported model has beside it must not change the tokenizer
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert [theirs(text)["input_ids"] for text in texts] == expected
        assert theirs.eos_token_id == tokenizer.eos_id
    again = load_tokenizer(tmp_path)
    assert again.identity() == tokenizer.identity()
    assert lists(again.encode_batch(TEXTS)) == lists(tokenizer.encode_batch(TEXTS))


def test_a_fast_encoder_that_differs_is_not_used(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "hf")
    source = json.loads(tokenizer._fast_source())
    source["model"]["merges"] = source["model"]["merges"][:-40]
    tokenizer._fast_source = lambda: json.dumps(source)  # type: ignore[method-assign]
    expected = lists(tokenizer.encode_batch(SENTENCES))
    reason = tokenizer.use_fast(SENTENCES)
    assert reason and "gigatoken gives other tokens" in reason and not tokenizer.is_fast
    assert lists(tokenizer.encode_batch(SENTENCES)) == expected
    tokenizer._fast_source = lambda: "{}"  # type: ignore[method-assign]
    assert "does not support" in (tokenizer.use_fast([]) or "")


def test_eos_is_found_or_asked_for(tmp_path: Path) -> None:
    hf = huggingface_folder(tmp_path / "hf")
    config, generation = hf / "tokenizer_config.json", hf / "generation_config.json"
    assert load_tokenizer(hf).eos_id == 0
    assert load_tokenizer(hf, eos_id=1).eos_id == 1
    config.write_text(json.dumps({"eos_token": {"content": "<|pad|>"}}))
    assert load_tokenizer(hf).eos_id == 1
    config.write_text("{}")
    assert load_tokenizer(hf).eos_id == 0  # the usual spelling
    generation.write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert load_tokenizer(hf).eos_id == 1
    generation.unlink()
    text = (hf / "tokenizer.json").read_text().replace("<|endoftext|>", "<<end>>")
    (hf / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"no end-of-document token.*--eos-id"):
        load_tokenizer(hf)
    config.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(UserError, match="'<none>' is not in the vocabulary"):
        load_tokenizer(hf)
    with pytest.raises(UserError, match=r"eos_id 5000 is not in 0\.\."):
        load_tokenizer(hf, eos_id=5000)


def test_eos_named_only_in_the_config_stays_text_too(tmp_path: Path) -> None:
    hf = huggingface_folder(tmp_path / "hf")
    definition = json.loads((hf / "tokenizer.json").read_text())
    definition["added_tokens"][0]["special"] = False
    (hf / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(hf)
    for _ in range(2):
        (ids,) = tokenizer.encode_batch(["one<|endoftext|>two"])
        assert tokenizer.eos_id not in ids.tolist()
        assert tokenizer.use_fast([]) is None


def test_hash_follows_the_content_not_the_spelling_of_the_file(tmp_path: Path) -> None:
    hf = huggingface_folder(tmp_path / "hf")
    before = load_tokenizer(hf).sha256
    definition = json.loads((hf / "tokenizer.json").read_text())
    definition["model"]["merges"] = [" ".join(pair) for pair in definition["model"]["merges"]]
    (hf / "tokenizer.json").write_text(json.dumps(definition, indent=3, sort_keys=True))
    assert load_tokenizer(hf).sha256 == before
    definition["model"]["merges"].pop()
    (hf / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(hf).sha256 != before


def test_unusable_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.model").write_bytes(b"\x0a\xff\xff")
    (tmp_path / "text.model").write_text("plain text, not a model")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    (tmp_path / "vocab.txt").write_text("a")
    sentencepiece_model(tmp_path / "unigram.model", model_type="unigram", vocab_size=340)
    cases = {
        "missing": "no such file or folder",
        "empty": "neither tokenizer.json nor tokenizer.model",
        "no.model": "not a SentencePiece model",
        "text.model": "not a SentencePiece model",
        "tokenizer.json": "not a Hugging Face tokenizer.json",
        "vocab.txt": "expected a folder",
        "unigram.model": "of type unigram is not supported",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("name", ["dolma2", "llama2", "gpt2", "mistral_v1.model"])
def test_real_tokenizers_on_real_text(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    data = real_data()
    tokenizer: Tokenizer = load_tokenizer(data / "tokenizers" / name)
    lines = (data / "corpora" / "owt.jsonl").read_text("utf-8").splitlines()[:200]
    texts = [json.loads(line)["text"] for line in lines]
    assert tokenizer.use_fast([*texts, *TEXTS]) is None
    ids = lists(tokenizer.encode_batch(texts))
    assert tokenizer.decode(ids[0]).strip() == texts[0].strip()
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(texts)["input_ids"] == ids
