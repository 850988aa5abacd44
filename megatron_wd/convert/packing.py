"""How Hugging Face tensors lie in Megatron's: the ways of packing, and the rules that use them.

A rule names one Megatron tensor, the Hugging Face tensors in it, and the packing between them. From
that follow the names and shapes on both sides, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_wd.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Packing(Protocol):
    """How one or several Hugging Face tensors lie in one Megatron tensor.

    Attributes:
        whole_rows: Whether each part is a run of its rows, so that `unpack` returns contiguous views.
    """

    whole_rows: bool

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        """Returns the shape of the Megatron tensor, given the shape of each part."""
        ...

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        """Returns the parts of a Megatron tensor, views of it where that is possible."""
        ...

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Returns the Megatron tensor that holds the parts; undoes `unpack`."""
        ...


class _Stacked:
    """The parts one after the other: [gate; up], or a single tensor that is equal on both sides."""

    whole_rows = True

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        return list(packed.split([shape[0] for shape in shapes]))

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        import torch

        return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _PerGroup:
    """Query, key and value by key/value group: [q q k v | q q k v | ...] for two queries per group.

    Megatron packs them so that each tensor-parallel rank gets whole groups. Query head h belongs to
    group h // (heads / groups) on both sides, and both keep the two rotary halves of a head apart.
    """

    whole_rows = False

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        return STACKED.packed_shape(shapes, model)

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        groups = model.kv_heads
        # [g, rows per group, ...], so that a part is a slice of axis 1
        grouped = packed.unflatten(0, (groups, -1))
        per_group = [shape[0] // groups for shape in shapes]
        return [part.flatten(0, 1) for part in grouped.split(per_group, dim=1)]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        import torch

        groups = model.kv_heads
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


class _PaddedRows:
    """One tensor with a row per token id, padded with rows of zeros that belong to no token."""

    whole_rows = True

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        return (model.padded_vocab_size, *shapes[0][1:])

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        return [packed[: shapes[0][0]]]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        (table,) = parts
        if table.shape[0] == model.padded_vocab_size:
            return table
        packed = table.new_empty(model.padded_vocab_size, *table.shape[1:])
        packed[: table.shape[0]] = table
        packed[table.shape[0] :] = 0
        return packed


class _Transposed:
    """One matrix that Hugging Face keeps as [in, out] (GPT-2's Conv1D), Megatron as [out, in]."""

    whole_rows = False

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        return shapes[0][::-1]

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        return [packed.t()]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0].t()


class _FusedPerGroup:
    """GPT-2's c_attn, queries, keys and values of all heads one after the other, in one tensor.

    A bias [3 h], or a matrix [h, 3 h] that is transposed besides; in Megatron by head, as above.
    """

    whole_rows = False

    def packed_shape(self, shapes: Sequence[Shape], model: ModelConfig) -> Shape:
        return shapes[0][::-1]

    def unpack(self, packed: Tensor, shapes: Sequence[Shape], model: ModelConfig) -> list[Tensor]:
        import torch

        third = (shapes[0][-1] // 3,)
        return [torch.cat(PER_GROUP.unpack(packed, [third] * 3, model)).t()]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return PER_GROUP.pack(parts[0].t().chunk(3), model)


STACKED, PER_GROUP, PADDED_ROWS = _Stacked(), _PerGroup(), _PaddedRows()
TRANSPOSED, FUSED_PER_GROUP = _Transposed(), _FusedPerGroup()


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor: its name, where `{layer}` is the block's number, and its shape.

    The lengths of axes are words of `sizes`.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One line of a name table.

    Attributes:
        megatron: Name in the checkpoint; `{attention}` and `{mlp}` are the block's layer numbers.
        parts: The Hugging Face tensors that it holds.
        packing: How it holds them.
        also: Other names of the same tensor, in other layer implementations.
        untied_only: Whether the tensor is absent where the output layer shares the embedding.
    """

    megatron: str
    parts: tuple[Part, ...]
    packing: Packing = STACKED
    also: tuple[str, ...] = ()
    untied_only: bool = False


def sizes(model: ModelConfig) -> dict[str, int]:
    """The words for the lengths of axes."""
    return {
        "vocab": model.vocab_size,
        "positions": model.max_positions or 0,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "query": model.num_attention_heads * model.head_size,
        "key_value": model.kv_heads * model.head_size,
        "query_key_value": (model.num_attention_heads + 2 * model.kv_heads) * model.head_size,
    }


@dataclass(frozen=True)
class Tensors:
    """One Megatron tensor of a certain model and what it holds.

    Attributes:
        megatron: Names under which it may be stored, the usual one first.
        megatron_shape: Its shape.
        hf: Name and shape of each Hugging Face tensor in it, in packing order.
        packing: How it holds them.
    """

    megatron: tuple[str, ...]
    megatron_shape: Shape
    hf: tuple[tuple[str, Shape], ...]
    packing: Packing

    @property
    def name(self) -> str:
        """Its usual name in a checkpoint."""
        return self.megatron[0]

    @property
    def num_values(self) -> int:
        """Scalars in it, those of the padding included."""
        return math.prod(self.megatron_shape)

    def unpack(self, packed: Tensor, model: ModelConfig) -> dict[str, Tensor]:
        """Returns the Hugging Face tensors by name, views of `packed` where that is possible."""
        parts = self.packing.unpack(packed, [shape for _, shape in self.hf], model)
        return {name: part for (name, _), part in zip(self.hf, parts, strict=True)}

    def pack(self, parts: dict[str, Tensor], model: ModelConfig) -> Tensor:
        """Returns the Megatron tensor, from Hugging Face tensors by name."""
        return self.packing.pack([parts[name] for name, _ in self.hf], model)
