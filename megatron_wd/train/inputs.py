"""What a run reads: tokenizer and corpora, opened and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_wd.config import Config, CorpusConfig, UserError
from megatron_wd.data.dataset import SampleStream, TokenFile, check_data
from megatron_wd.data.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Data:
    """What the run reads.

    Attributes:
        tokenizer: belongs to the data and goes into every checkpoint.
        train, valid: samples; `valid` is None where none is configured.
    """

    tokenizer: Tokenizer
    train: SampleStream
    valid: SampleStream | None

    @property
    def train_tokens(self) -> int:
        """Tokens in the training corpora."""
        return sum(len(file.tokens) for file in self.train.files)


def open_data(config: Config) -> Data:
    """Opens tokenizer and corpora.

    Raises:
        UserError: one of them is missing or damaged.
    """
    sequence = config.train.sequence_tokens
    return Data(
        tokenizer=load_tokenizer(config.data.tokenizer),
        train=SampleStream(config.data.train, sequence, config.seed),
        # Validation does not follow the run's seed: runs of a sweep are measured on the same tokens.
        valid=SampleStream(config.data.valid, sequence, 0) if config.data.valid else None,
    )


def check_data_fits(config: Config, data: Data) -> None:
    """Stops where tokenizer, corpora and model do not belong together.

    Raises:
        UserError: naming both sides and the remedy.
    """
    vocab_size = config.model.vocab_size
    _check_tokenizer(config, data.tokenizer)
    check_data(data.train, vocab_size, data.tokenizer.sha256)
    if data.valid is None:
        return
    check_data(data.valid, vocab_size, data.tokenizer.sha256)
    if data.valid.num_samples() < config.evaluate.samples:
        raise UserError(
            f"evaluate.samples={config.evaluate.samples}, but data.valid holds only "
            f"{data.valid.num_samples()} samples of {config.train.sequence_tokens} tokens. Lower "
            "evaluate.samples."
        )


def check_what_exists(config: Config) -> tuple[int | None, list[str]]:
    """Opens and checks as much of what a run reads as there is on this machine.

    Returns:
        Tokens in the training corpora (None where anything is missing), and the paths that are missing.

    Raises:
        UserError: something that exists is damaged or does not fit.
    """
    corpora = config.data.train + config.data.valid
    missing = [corpus.path for corpus in corpora if not _exists(corpus)]
    if not Path(config.data.tokenizer).exists():
        missing.insert(0, config.data.tokenizer)
    if not missing:
        data = open_data(config)
        check_data_fits(config, data)
        return data.train_tokens, []
    for corpus in corpora:
        if _exists(corpus):
            TokenFile(corpus.path)
    if config.data.tokenizer not in missing:
        _check_tokenizer(config, load_tokenizer(config.data.tokenizer))
    return None, missing


def _exists(corpus: CorpusConfig) -> bool:
    """Whether any of a corpus is there; half of one is a mistake to be told."""
    return any(Path(corpus.path + ending).exists() for ending in (".bin", ".idx"))


def _check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    vocab_size = config.model.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} ids, more than "
            f"model.vocab_size={vocab_size}. Set model.vocab_size to at least that."
        )
