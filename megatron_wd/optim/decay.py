"""Which parameters decay: resolved once into an explicit table over global names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron_wd.config import Config
from megatron_wd.models.names import named_parameters


@dataclass(frozen=True)
class DecayRow:
    """One parameter of the whole model.

    Attributes:
        name: global name.
        shape: of the whole tensor, over all tensor-parallel ranks.
        rule: what decided.
        weight_decay: its coefficient; the step multiplies it by the learning rate.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    weight_decay: float


def decays(name: str, ndim: int, choice: str) -> bool:
    """Whether a parameter decays under `optim.decay`.

    Args:
        name: global name.
        ndim: number of dimensions.
        choice: "all" (the weight-decay study's Llama code), "skip_1d" (Megatron: no norms, no biases) or
            "skip_embeddings" (OLMo-2: all but the embedding table).
    """
    if choice == "skip_1d":
        return ndim > 1
    if choice == "skip_embeddings":
        return not name.startswith("embedding.")
    return True


def decay_table(model: list[nn.Module], config: Config) -> list[DecayRow]:
    """The table of the whole model, gathered over all ranks; the same on every rank and layout.

    Collective: every rank must call it.
    """
    import torch.distributed as dist

    gathered: list[list[DecayRow] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, decay_rows(model, config))
    return merge_rows(part for part in gathered if part is not None)


def decay_rows(model: list[nn.Module], config: Config) -> list[DecayRow]:
    """The rows of this rank's parameters."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    rows: dict[str, DecayRow] = {}
    for name, param in named_parameters(model):
        shape = list(param.shape)
        if getattr(param, "tensor_model_parallel", False):
            shape[param.partition_dim] *= size  # type: ignore[attr-defined]
        decay = config.optim.weight_decay if decays(name, param.dim(), config.optim.decay) else 0.0
        rows[name] = DecayRow(name, tuple(shape), config.optim.decay, decay)
    return list(rows.values())


def merge_rows(parts: Iterable[list[DecayRow]]) -> list[DecayRow]:
    """The table from the rows of several ranks, each parameter once, in the order of layers."""
    whole: dict[str, DecayRow] = {}
    for row in (row for part in parts for row in part):
        assert whole.setdefault(row.name, row) == row, f"ranks disagree about {row.name}"
    return sorted(whole.values(), key=lambda row: _natural(row.name))


def write_decay_table(rows: list[DecayRow], path: Path) -> None:
    """Writes the table as tab-separated values: parameter, shape, rule, weight_decay."""
    lines = ["parameter\tshape\trule\tweight_decay"]
    for row in rows:
        shape = "x".join(map(str, row.shape))
        lines.append(f"{row.name}\t{shape}\t{row.rule}\t{row.weight_decay:g}")
    path.write_text("\n".join(lines) + "\n")


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts layer 10 behind layer 9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))
