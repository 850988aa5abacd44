"""Which Megatron tensor is which Hugging Face tensor: one table per model family.

A table is data. A rule names one Megatron tensor, the Hugging Face tensors that it holds, and the
packing between them; from that follow the names and shapes on both sides, in both directions. A
model block is two Megatron layers, attention 2i and MLP 2i+1 (HybridModel's layout).

Shapes are written with the words of `_sizes`; axis 0 is the output of a matrix on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_wd.config import ModelConfig, UserError

if TYPE_CHECKING:
    from torch import Tensor


class Packing(Protocol):
    """How several Hugging Face tensors lie in one Megatron tensor, along axis 0."""

    def packed_rows(self, rows: Sequence[int], model: ModelConfig) -> int:
        """Returns the rows of the Megatron tensor, given the rows of each part."""
        ...

    def unpack(self, packed: Tensor, rows: Sequence[int], model: ModelConfig) -> list[Tensor]:
        """Returns the parts of a Megatron tensor, `rows[i]` rows in part i."""
        ...

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Returns the Megatron tensor that holds the parts; undoes `unpack`."""
        ...


class _Stacked:
    """The parts one after the other: [gate; up], or a single tensor that is equal on both sides."""

    def packed_rows(self, rows: Sequence[int], model: ModelConfig) -> int:
        return sum(rows)

    def unpack(self, packed: Tensor, rows: Sequence[int], model: ModelConfig) -> list[Tensor]:
        return list(packed.split(list(rows)))

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        import torch

        return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _PerGroup:
    """Query, key and value by key/value group: [q q k v | q q k v | ...] for two queries per group.

    Megatron packs them so that each tensor-parallel rank gets whole groups. Query head h belongs to
    group h // (heads / groups) on both sides, and both keep the two rotary halves of a head apart.
    """

    def packed_rows(self, rows: Sequence[int], model: ModelConfig) -> int:
        return sum(rows)

    def unpack(self, packed: Tensor, rows: Sequence[int], model: ModelConfig) -> list[Tensor]:
        groups = model.kv_heads
        # [g, rows per group, ...], so that a part is a slice of axis 1
        grouped = packed.unflatten(0, (groups, -1))
        per_group = [count // groups for count in rows]
        return [part.flatten(0, 1) for part in grouped.split(per_group, dim=1)]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        import torch

        groups = model.kv_heads
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


class _PaddedRows:
    """One tensor with a row per token id, padded with rows that belong to no token."""

    def packed_rows(self, rows: Sequence[int], model: ModelConfig) -> int:
        return model.padded_vocab_size

    def unpack(self, packed: Tensor, rows: Sequence[int], model: ModelConfig) -> list[Tensor]:
        return [packed[: rows[0]]]

    def pack(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        (table,) = parts
        packed = table.new_zeros(model.padded_vocab_size, *table.shape[1:])
        packed[: table.shape[0]] = table
        return packed


STACKED, PER_GROUP, PADDED_ROWS = _Stacked(), _PerGroup(), _PaddedRows()


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor: its name, where `{layer}` is the block's number, and its shape."""

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


_ATTENTION, _MLP, _BLOCK = (
    "decoder.layers.{attention}",
    "decoder.layers.{mlp}",
    "model.layers.{layer}",
)

LLAMA: tuple[Rule, ...] = (
    Rule(
        "embedding.word_embeddings.weight",
        (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
        PADDED_ROWS,
    ),
    Rule(
        f"{_ATTENTION}.self_attention.linear_qkv.layer_norm_weight",
        (Part(f"{_BLOCK}.input_layernorm.weight", ("hidden",)),),
        also=(f"{_ATTENTION}.input_layernorm.weight",),
    ),
    Rule(
        f"{_ATTENTION}.self_attention.linear_qkv.weight",
        (
            Part(f"{_BLOCK}.self_attn.q_proj.weight", ("query", "hidden")),
            Part(f"{_BLOCK}.self_attn.k_proj.weight", ("key_value", "hidden")),
            Part(f"{_BLOCK}.self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        PER_GROUP,
    ),
    Rule(
        f"{_ATTENTION}.self_attention.linear_proj.weight",
        (Part(f"{_BLOCK}.self_attn.o_proj.weight", ("hidden", "query")),),
    ),
    Rule(
        f"{_MLP}.mlp.linear_fc1.layer_norm_weight",
        (Part(f"{_BLOCK}.post_attention_layernorm.weight", ("hidden",)),),
        also=(f"{_MLP}.pre_mlp_layernorm.weight",),
    ),
    Rule(
        f"{_MLP}.mlp.linear_fc1.weight",
        (
            Part(f"{_BLOCK}.mlp.gate_proj.weight", ("ffn", "hidden")),
            Part(f"{_BLOCK}.mlp.up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    Rule(
        f"{_MLP}.mlp.linear_fc2.weight",
        (Part(f"{_BLOCK}.mlp.down_proj.weight", ("hidden", "ffn")),),
    ),
    Rule("decoder.final_norm.weight", (Part("model.norm.weight", ("hidden",)),)),
    Rule(
        "output_layer.weight",
        (Part("lm_head.weight", ("vocab", "hidden")),),
        PADDED_ROWS,
        untied_only=True,
    ),
)

# The families that can be converted. A new one is one more table.
TABLES: Mapping[str, tuple[Rule, ...]] = {"llama2": LLAMA}

# What lies in a checkpoint beside the model: state of the optimizer and of the run.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state_machine_state")


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
    megatron_shape: tuple[int, ...]
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    packing: Packing

    def unpack(self, packed: Tensor, model: ModelConfig) -> dict[str, Tensor]:
        """Returns the Hugging Face tensors by name, views of `packed` where that is possible."""
        rows = [shape[0] for _, shape in self.hf]
        parts = self.packing.unpack(packed, rows, model)
        return {name: part for (name, _), part in zip(self.hf, parts, strict=True)}

    def pack(self, parts: Mapping[str, Tensor], model: ModelConfig) -> Tensor:
        """Returns the Megatron tensor, from Hugging Face tensors by name."""
        return self.packing.pack([parts[name] for name, _ in self.hf], model)


def tensors_of(model: ModelConfig) -> list[Tensors]:
    """Lists every tensor of a model, in the order of its layers.

    Args:
        model: Shape of the model.

    Raises:
        UserError: If the family has no name table.
    """
    if model.family not in TABLES:
        known = ", ".join(sorted(TABLES))
        raise UserError(f"model.family {model.family!r} cannot be converted; these can: {known}.")
    return list(_expand(TABLES[model.family], model))


def _expand(table: Sequence[Rule], model: ModelConfig) -> Iterator[Tensors]:
    """Fills in layer numbers: neighbouring rules with one are repeated together, block by block."""
    for per_block, rules in itertools.groupby(table, key=lambda rule: "{" in rule.megatron):
        group = [rule for rule in rules if not (rule.untied_only and model.tie_embeddings)]
        for layer in range(model.num_layers if per_block else 1):
            for rule in group:
                yield _fill(rule, model, layer)


def _fill(rule: Rule, model: ModelConfig, layer: int) -> Tensors:
    numbers = {"layer": layer, "attention": 2 * layer, "mlp": 2 * layer + 1}
    sizes = _sizes(model)
    hf = tuple(
        (part.name.format(**numbers), tuple(sizes[word] for word in part.shape))
        for part in rule.parts
    )
    rows = rule.packing.packed_rows([shape[0] for _, shape in hf], model)
    return Tensors(
        megatron=tuple(name.format(**numbers) for name in (rule.megatron, *rule.also)),
        megatron_shape=(rows, *hf[0][1][1:]),
        hf=hf,
        packing=rule.packing,
    )


def _sizes(model: ModelConfig) -> dict[str, int]:
    """The words for the lengths of axes."""
    return {
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "query": model.num_attention_heads * model.head_size,
        "key_value": model.kv_heads * model.head_size,
    }


def match_checkpoint(
    model: ModelConfig, stored: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Tensors]]:
    """Finds every tensor of a model in a checkpoint.

    Args:
        model: Shape of the model.
        stored: Name and shape of each tensor in the checkpoint. Those of the optimizer, of the run,
            and `_extra_state` (fp8 scales, which a converted model does not need) are passed over.

    Returns:
        Stored name and description of each tensor, in the order of the layers.

    Raises:
        UserError: If a tensor is missing, has another shape than the config says, or is left over.
            All of them are named, up to a few.
    """
    left = {name: shape for name, shape in stored.items() if _is_model_tensor(name)}
    matched, missing, misshapen = [], [], []
    for tensors in tensors_of(model):
        name = next((name for name in tensors.megatron if name in left), None)
        if name is None:
            missing.append(tensors.megatron[0])
            continue
        shape = left.pop(name)
        if shape != tensors.megatron_shape:
            misshapen.append(f"{name} has {list(shape)} instead of {list(tensors.megatron_shape)}")
        matched.append((name, tensors))
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("not part of the model", sorted(left)),
            ("of another shape", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(
            "the checkpoint's tensors do not fit the model of its config.yaml; "
            + "; ".join(problems)
            + ". Was config.yaml edited, or taken from another run?"
        )
    return matched


def _is_model_tensor(name: str) -> bool:
    return not name.startswith(_NOT_MODEL) and "_extra_state" not in name.rsplit(".", 1)[-1]


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
