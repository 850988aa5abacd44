"""Model families as facts: what a block of each is made of.

Everything that only counts or names parameters follows from these facts. How the parts are built is
in `models/`, what they are called elsewhere in `convert/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """What distinguishes one architecture from another.

    Attributes:
        norm: "rms" has a gain; "layer" subtracts the mean too and has a gain and a bias.
        norm_place: Whether a norm stands before each sublayer, or after it (before the residual sum).
        qk_norm: Whether queries and keys are normed, each over all of its heads together.
        gated_mlp: SwiGLU with a gate and an up projection, or else one projection and a GELU.
        biases: Whether linear layers have biases.
        positions: Rotary embedding of queries and keys, or a learned table.
        grouped_queries: Whether there may be fewer key/value heads than heads, and heads whose
            widths do not add up to the hidden size.
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_place: Literal["before", "after"] = "before"
    qk_norm: bool = False
    gated_mlp: bool = True
    biases: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    grouped_queries: bool = True


FAMILIES: dict[str, Family] = {
    # Touvron et al., "Llama 2", arXiv 2307.09288.
    "llama2": Family(),
    # OLMo team, "2 OLMo 2 Furious", arXiv 2501.00656.
    "olmo2": Family(norm_place="after", qk_norm=True),
    # Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    "gpt2": Family(
        norm="layer", gated_mlp=False, biases=True, positions="learned", grouped_queries=False
    ),
}
