"""Checks an export: the logits of transformers against those of the Megatron model itself."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_wd.convert.checkpoint import open_checkpoint
from megatron_wd.convert.hf_load import load_model
from megatron_wd.convert.shape import run_around
from megatron_wd.convert.weights import Weights, weights_of

if TYPE_CHECKING:
    from torch import Tensor

# Largest difference between logits, relative to the largest logit, in fp32 on both sides.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class VerifyReport:
    """How far the two models' logits are apart.

    Attributes:
        max_difference: Largest absolute difference between two logits.
        logits_scale: Largest absolute logit of the Megatron model.
        relative_difference: The first divided by the second.
        top1_agreement: Share of positions at which both models prefer the same token.
        num_positions: Positions compared.
        tolerance: Largest relative difference that passes.
    """

    max_difference: float
    logits_scale: float
    relative_difference: float
    top1_agreement: float
    num_positions: int
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; never where a logit is not a number."""
        return self.relative_difference <= self.tolerance


def compare_logits(ours_BSV: Tensor, theirs_BSV: Tensor, tolerance: float) -> VerifyReport:
    """Compares two logit tensors of shape [batch, sequence, vocabulary].

    Args:
        ours_BSV: Logits of the Megatron model.
        theirs_BSV: Logits of the exported model.
        tolerance: Largest relative difference that passes.
    """
    assert ours_BSV.shape == theirs_BSV.shape, (ours_BSV.shape, theirs_BSV.shape)
    difference = (ours_BSV - theirs_BSV).abs().max().item()
    scale = ours_BSV.abs().max().item()
    agreement = (ours_BSV.argmax(-1) == theirs_BSV.argmax(-1)).double().mean().item()
    return VerifyReport(
        max_difference=difference,
        logits_scale=scale,
        relative_difference=difference / max(scale, 1e-30),
        top1_agreement=agreement,
        num_positions=ours_BSV.shape[0] * ours_BSV.shape[1],
        tolerance=tolerance,
    )


def verify_export(
    source: str | os.PathLike[str],
    hf_folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str = "float32",
    num_samples: int = 2,
    sequence_tokens: int = 64,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> VerifyReport:
    """Runs both models on the same random tokens, in fp32 arithmetic.

    Random tokens, and many positions of them, because at position 0 the rotary embedding is the
    identity and a wrong order of its halves would not show.

    Args:
        source: What was exported.
        hf_folder: The export.
        step: The step that was exported; None for the latest.
        dtype: Of the export, by its torch name: the Megatron model's weights are rounded to it, so
            that a bf16 export is held to the same tolerance.
        num_samples: Sequences.
        sequence_tokens: Tokens per sequence, at most the model's training length.
        seed: Of the random tokens.
        tolerance: Largest relative difference that passes.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    import torch

    from megatron_wd.backend.world import quiet_libraries

    checkpoint = open_checkpoint(Path(source), step)
    model, run = checkpoint.model, checkpoint.config
    longest = model.max_positions or (sequence_tokens if run is None else run.train.sequence_tokens)
    length = min(sequence_tokens, longest)
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(model.vocab_size, (num_samples, length), generator=generator)
    with warnings.catch_warnings():
        quiet_libraries()
        ours = megatron_logits(weights_of(checkpoint), tokens_BS, dtype)
    theirs = _transformers_logits(Path(hf_folder), tokens_BS)
    return compare_logits(ours, theirs, tolerance)


def megatron_logits(weights: Weights, tokens_BS: Tensor, dtype: str = "float32") -> Tensor:
    """Logits [b, s, vocab_size] of the Megatron model, without the rows of the padding.

    Weights come through our own reader, because Megatron's executes what it finds (see `dcp`).

    Args:
        weights: What the model is given.
        tokens_BS: Token ids.
        dtype: That the weights are rounded to, by its torch name; arithmetic is in fp32.
    """
    import torch

    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import single_process
    from megatron_wd.models.build import build_model
    from megatron_wd.models.names import named_parameters

    config = run_around(weights.model)
    config.model = replace(config.model, dropout=0.0)
    config.train.sequence_tokens = tokens_BS.shape[1]
    config.parallel.distributed_optimizer = False
    with single_process() as world, torch.no_grad(), cpu.cuda_requests_on_cpu():
        model = build_model(config)
        for name, parameter in named_parameters(model):
            parameter.copy_(weights.read(name).to(getattr(torch, dtype)))
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        inputs = (tokens_BS.to(world.device), positions_BS.to(world.device), None)
        logits = model[0].eval()(*inputs)
    return logits[..., : weights.model.vocab_size].float().cpu()


def _transformers_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    """Logits [b, s, vocab_size] of the export, loaded as its users load it."""
    import torch

    model = load_model(folder, "float32")
    with torch.no_grad():
        return model(tokens_BS).logits


def describe(report: VerifyReport) -> str:
    """Returns the report as one line."""
    verdict = "ok" if report.passed else f"FAILED, more than {report.tolerance:g}"
    return (
        f"largest difference {report.max_difference:.2e} between logits up to "
        f"{report.logits_scale:.3g} ({report.relative_difference:.1e} of it: {verdict}), same "
        f"first choice at {report.top1_agreement:.2%} of {report.num_positions} positions"
    )
