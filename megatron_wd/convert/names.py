"""Which Megatron tensor is which Hugging Face tensor, for a model of a certain shape.

The tables are in `families/`. A model block is two Megatron layers, attention 2i and MLP 2i+1
(HybridModel's layout).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from megatron_wd.config import ModelConfig, UserError
from megatron_wd.convert.families import converted_family
from megatron_wd.convert.packing import Rule, Shape, Tensors, sizes

# What lies in a checkpoint beside the model: state of the optimizer and of the run.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state_machine_state")


def tensors_of(model: ModelConfig) -> list[Tensors]:
    """Lists every tensor of a model, in the order of its layers.

    Args:
        model: Shape of the model.

    Raises:
        UserError: If the family has no name table.
    """
    return list(_expand(converted_family(model.family).rules, model))


def _expand(table: Sequence[Rule], model: ModelConfig) -> Iterator[Tensors]:
    """Fills in layer numbers: neighbouring rules with one are repeated together, block by block."""
    for per_block, rules in itertools.groupby(table, key=lambda rule: "{" in rule.megatron):
        group = [rule for rule in rules if not (rule.untied_only and model.tie_embeddings)]
        for layer in range(model.num_layers if per_block else 1):
            for rule in group:
                yield _fill(rule, model, layer)


def _fill(rule: Rule, model: ModelConfig, layer: int) -> Tensors:
    numbers = {"layer": layer, "attention": 2 * layer, "mlp": 2 * layer + 1}
    lengths = sizes(model)
    hf = tuple(
        (part.name.format(**numbers), tuple(lengths[word] for word in part.shape))
        for part in rule.parts
    )
    return Tensors(
        megatron=tuple(name.format(**numbers) for name in (rule.megatron, *rule.also)),
        megatron_shape=rule.packing.packed_shape([shape for _, shape in hf], model),
        hf=hf,
        packing=rule.packing,
    )


def match_checkpoint(
    model: ModelConfig, stored: Mapping[str, Shape], *, where: str = "config.yaml"
) -> list[tuple[str, Tensors]]:
    """Finds every tensor of a model in a checkpoint.

    Args:
        model: Shape of the model.
        stored: Name and shape of each tensor in the checkpoint. Those of the optimizer, of the run,
            and `_extra_state` (fp8 scales, which a converted model does not need) are passed over.
        where: What says the shape of the model, for the message.

    Returns:
        Stored name and description of each tensor, in the order of the layers.

    Raises:
        UserError: If a tensor is missing, has another shape than the config says, or is left over.
            All of them are named, up to a few.
    """
    left = {name: shape for name, shape in stored.items() if is_model_tensor(name)}
    matched, missing, misshapen = [], [], []
    for tensors in tensors_of(model):
        name = next((name for name in tensors.megatron if name in left), None)
        if name is None:
            missing.append(tensors.name)
            continue
        shape = left.pop(name)
        if shape != tensors.megatron_shape:
            misshapen.append((name, shape, tensors.megatron_shape))
        matched.append((name, tensors))
    raise_misfits(
        f"the checkpoint's tensors do not fit the model of its {where}",
        missing,
        sorted(left),
        misshapen,
        f"Was {where} edited, or taken from another run?",
    )
    return matched


def is_model_tensor(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of the model's weights."""
    return not name.startswith(_NOT_MODEL) and "_extra_state" not in name.rsplit(".", 1)[-1]


def raise_misfits(
    what: str,
    missing: Sequence[str],
    left: Sequence[str],
    misshapen: Sequence[tuple[str, Shape, Shape]],
    remedy: str,
) -> None:
    """Names the tensors that do not fit, up to a few of each kind; nothing if all of them do.

    Args:
        what: Start of the message.
        missing: Tensors that a model needs and that are not there.
        left: Tensors that are there and belong to nothing.
        misshapen: Name, shape and needed shape.
        remedy: End of the message.

    Raises:
        UserError: If there are any.
    """
    shapes = [f"{name} has {list(has)} instead of {list(needs)}" for name, has, needs in misshapen]
    problems = [
        f"{kind}: {_some(names)}"
        for kind, names in (
            ("missing", missing),
            ("not part of the model", left),
            ("of another shape", shapes),
        )
        if names
    ]
    if problems:
        raise UserError(f"{what}; {'; '.join(problems)}. {remedy}")


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
