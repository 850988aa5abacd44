"""Starting from weights that exist: those of a Hugging Face folder, a run or a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from megatron_wd.config import Config, ModelConfig, UserError
from megatron_wd.convert.weights import Weights, open_weights
from megatron_wd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_wd.models.init import copy_part, whole_shape
from megatron_wd.models.names import named_parameters

# What may differ: how weights would be drawn, and what training adds.
_FREE = {"init", "init_std", "dropout", "num_query_groups", "head_dim", "max_positions"}
# Encoded by both tokenizers, besides every token, to see whether they are the same.
_SAMPLES = (
    "The quick brown fox, 1234567890 times; it's over.",
    "def main():\n\treturn {'a': [1, 2.5e-3]}  # done\n\n\n",
    "Grüße, мир, 世界, العالم \U0001f642 \u200b fin",
    "  leading and trailing  ",
)


def check_origin(config: Config) -> None:
    """Checks that a run does not start from itself.

    Raises:
        UserError: `init_from` lies in the run's own folder.
    """
    if config.init_from is None:
        return
    origin = Path(config.init_from).resolve()
    if Path(config.run_dir).resolve() in (origin, *origin.parents):
        raise UserError(
            f"init_from {config.init_from} lies in run_dir {config.run_dir}: a run cannot start from "
            "itself. To go on with a run, give the config that it was started with."
        )


def load_initial_weights(model: list[nn.Module], config: Config, tokenizer: Tokenizer) -> Weights:
    """Fills this rank's parameters with its parts of the weights at `init_from`, whatever layout both have.

    Memory: one whole tensor at a time. In bf16 runs the fp32 masters start from the bf16 weights.

    Args:
        model: this rank's chunks, before the optimizer copies them.
        config: the run.
        tokenizer: of the run's data.

    Returns:
        The weights, for what they say about themselves.

    Raises:
        UserError: they are of another model or another tokenizer, or cannot be read.
    """
    assert config.init_from is not None
    weights = open_weights(Path(config.init_from))
    _check_model(weights, config.model)
    _check_tokenizer(weights, tokenizer)
    for name, param in named_parameters(model):
        whole = weights.read(name)
        assert tuple(whole.shape) == whole_shape(param), (name, whole.shape, param.shape)
        copy_part(param, whole)
    return weights


def _check_model(weights: Weights, model: ModelConfig) -> None:
    ours, theirs = asdict(model), asdict(weights.model)
    for shape, of in ((ours, model), (theirs, weights.model)):
        shape |= {"num_query_groups (key/value heads)": of.kv_heads, "head width": of.head_size}
        if of.facts.positions == "learned":
            shape["max_positions (rows of the table)"] = of.max_positions
    differing = [
        f"model.{name}: {theirs[name]} there, {ours[name]} in this config"
        for name in ours
        if name not in _FREE and theirs.get(name) != ours[name]
    ]
    if differing:
        raise UserError(
            f"init_from: {weights.description} is another model than this config's:\n  "
            + "\n  ".join(differing)
            + f"\n`python tools/convert.py inspect {weights.path}` shows what to write under `model:`."
        )


def _check_tokenizer(weights: Weights, tokenizer: Tokenizer) -> None:
    if weights.tokenizer is None:
        return
    theirs = load_tokenizer(weights.tokenizer)
    if theirs.sha256 == tokenizer.sha256:
        return
    # Files may differ and mean the same (a SentencePiece model and its export): every token's text decides.
    texts = [*_SAMPLES, *(theirs.decode([number]) for number in range(theirs.vocab_size))]
    pairs = zip(theirs.encode_batch(texts), tokenizer.encode_batch(texts), strict=True)
    if theirs.eos_id != tokenizer.eos_id or not all(np.array_equal(a, b) for a, b in pairs):
        raise UserError(
            f"init_from: {weights.description} was trained with another tokenizer than the data of this "
            f"run ({tokenizer.path}); its token ids mean other text. Prepare the data with "
            f"{weights.tokenizer}."
        )
