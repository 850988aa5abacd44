"""The order of samples: a permutation from (seed, epoch) alone, blends by weight, damaged files named."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tiny import write_documents

from megatron_wd.config import CorpusConfig, UserError
from megatron_wd.data.dataset import SampleStream, TokenFile, check_data, permuted


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_documents(tmp_path / "a", [np.arange(0, 700), np.arange(700, 1001)])
    return tmp_path / "a"


def blend(*corpora: tuple[Path, float], sequence: int = 10, seed: int | None = 1) -> SampleStream:
    return SampleStream([CorpusConfig(str(p), w) for p, w in corpora], sequence, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100, 1000])
def test_permuted_is_a_permutation_that_its_key_names(size: int) -> None:
    first = [permuted(i, size, "seed:0") for i in range(size)]
    assert sorted(first) == list(range(size))
    if size >= 64:
        assert first != list(range(size))
        assert first != [permuted(i, size, "seed:1") for i in range(size)]


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order(corpus: Path) -> None:
    stream = blend((corpus, 1.0))
    assert stream.num_samples() == 100
    epochs = [[stream.locate(e * 100 + i)[2] for i in range(100)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
    assert epochs[0] == [blend((corpus, 1.0)).locate(i)[2] for i in range(100)]
    assert epochs[0] != [blend((corpus, 1.0), seed=2).locate(i)[2] for i in range(100)]


def test_a_sample_is_a_window_with_one_token_more(corpus: Path) -> None:
    stream = blend((corpus, 1.0), seed=None)
    assert stream[0].tolist() == list(range(11))
    assert stream[99].tolist() == list(
        range(990, 1001)
    )  # across the documents' border, to the last token
    assert stream[99].dtype == np.int64


def test_a_blend_follows_its_weights_from_the_first_sample_on(corpus: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "b", [np.arange(1001)])
    stream = blend((corpus, 3.0), (tmp_path / "b", 1.0))
    for count in (40, 400, 4000):
        drawn = Counter(stream.locate(i)[0] for i in range(count))
        assert abs(drawn[0] - 0.75 * count) <= 2, count
    # The two corpora are gone through independently: each of theirs once before any twice.
    seen = [stream.locate(i)[2] for i in range(400) if stream.locate(i)[0] == 1]
    assert sorted(seen) == list(range(100))


def test_a_vanishing_weight_is_an_error(corpus: Path) -> None:
    assert blend((corpus, 1e308), (corpus, 1e308)).locate(1)[0] == 1
    with pytest.raises(UserError, match="would never be drawn"):
        blend((corpus, 1.0), (corpus, 1e-9))


def test_damaged_files_are_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.bin does not exist"):
        TokenFile(str(tmp_path / "nothing"))
    binary, index = Path(f"{corpus}.bin"), Path(f"{corpus}.idx")
    whole = binary.read_bytes()
    binary.write_bytes(whole[:-2])
    with pytest.raises(UserError, match="truncated"):
        TokenFile(str(corpus))
    binary.write_bytes(whole)
    index_bytes = index.read_bytes()
    for cut in (0, 5, 20, len(index_bytes) - 3):
        index.write_bytes(index_bytes[:cut])
        with pytest.raises(UserError, match="not a complete Megatron index"):
            TokenFile(str(corpus))
    index.unlink()
    with pytest.raises(UserError, match=r"a\.idx does not exist"):
        TokenFile(str(corpus))


def test_data_and_model_must_fit(corpus: Path) -> None:
    with pytest.raises(UserError, match="less than one sample"):
        blend((corpus, 1.0), sequence=2000)
    stream = blend((corpus, 1.0))
    check_data(stream, vocab_size=1001, tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match=r"token id 1000, but model\.vocab_size=1000"):
        check_data(stream, vocab_size=1000, tokenizer_sha256="0" * 64)
    manifest = '{"tokenizer": {"sha256": "%s"}}' % ("f" * 64)
    Path(f"{corpus}.json").write_text(manifest)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        check_data(stream, vocab_size=1001, tokenizer_sha256="0" * 64)
    for damaged in (
        "{x",
        "",
        "[]",
        "{}",
        "null",
        '{"tokenizer": "x"}',
        '{"tokenizer": {"sha256": 5}}',
    ):
        Path(f"{corpus}.json").write_text(damaged)
        with pytest.raises(UserError, match=r"a\.json is not what"):
            check_data(stream, vocab_size=1001, tokenizer_sha256="0" * 64)


def test_a_negative_id_is_named(tmp_path: Path) -> None:
    documents = [np.arange(500), np.array([3, -5, 3])]
    write_documents(tmp_path / "signed", documents, dtype=np.int32)
    with pytest.raises(UserError, match="token id -5"):
        check_data(blend((tmp_path / "signed", 1.0)), vocab_size=1001, tokenizer_sha256="0" * 64)
