"""config.json of a Hugging Face folder and the shape of our model, in both directions.

Reading is strict: a field that would change a logit has the value that our models have, or is
refused by name; so is a field that nobody here has heard of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wd.config import ModelConfig, UserError
from megatron_wd.convert.families import CONVERTED, converted_family
from megatron_wd.convert.families.base import FIXED, HARMLESS, ConvertedFamily, Field
from megatron_wd.convert.shape import check_shape

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def export_config(
    model: ModelConfig, *, max_positions: int, dtype: str, ids: dict[str, int | None]
) -> dict[str, Any]:
    """Returns the content of config.json.

    Every value that changes the logits is written out, because defaults differ: LlamaConfig's eps
    is 1e-6, Olmo2Config's rope theta 10000.

    Args:
        model: Shape of the model.
        max_positions: Longest sequence that it is made for, in tokens.
        dtype: Of the weights, by its torch name.
        ids: `bos_token_id` and `eos_token_id`.
    """
    family = converted_family(model.family)
    shape: dict[str, Any] = {}
    for field in family.fields:
        value = getattr(model, field.exported or field.ours)
        shape[field.hf] = max_positions if field.ours == "max_positions" else field.kind(value)
    rope: dict[str, Any] = {}
    if model.facts.positions == "rotary":
        theta = float(model.rope_theta)
        # transformers 5 reads the first, older versions the second.
        rope = {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
        }
        dropped = ["attention_dropout"]
    else:
        dropped = ["attn_pdrop", "embd_pdrop", "resid_pdrop"]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **shape,
        **rope,
        **dict(family.exported),
        **{name: float(model.dropout) for name in dropped},
        "initializer_range": float(model.init_std),
        "use_cache": True,
        **ids,
        # transformers 5 reads the first, older versions the second.
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def read_config(folder: Path) -> ModelConfig:
    """Reads the shape of a model from the config.json of a folder.

    Raises:
        UserError: If there is none, or it asks for something that our models do not compute; the
            field is named.
    """
    path = folder / "config.json"
    if not path.is_file():
        found = "has no config.json" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} is no Hugging Face folder: it {found}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no fields.")
    try:
        model = shape_from_fields(content)
        check_shape(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return model


def shape_from_fields(content: Mapping[str, Any]) -> ModelConfig:
    """Returns the shape that the fields of a config.json describe.

    Raises:
        UserError: Naming the field.
    """
    name, family = _family_of(content)
    _refuse_unsupported(content, family)
    values: dict[str, Any] = {"family": name}
    for field in family.fields:
        values[field.ours] = _value(content, field)
    if values.get("ffn_hidden_size") is None:
        values["ffn_hidden_size"] = 4 * values["hidden_size"]  # GPT2Config's n_inner
    model = ModelConfig(**values)
    if model.facts.positions == "rotary":
        model.rope_theta = _rope_theta(content)
    std = content.get("initializer_range")
    if isinstance(std, float) and std > 0:
        model.init_std = std
    return model


def _family_of(content: Mapping[str, Any]) -> tuple[str, ConvertedFamily]:
    model_type = content.get("model_type")
    known = {family.model_type: (name, family) for name, family in CONVERTED.items()}
    classes = ", ".join(family.architecture for family in CONVERTED.values())
    if model_type not in known:
        raise UserError(f"model_type {model_type!r} is not supported; these are: {classes}.")
    architectures = content.get("architectures") or []
    name, family = known[model_type]
    if architectures and family.architecture not in architectures:
        raise UserError(f"architectures {architectures!r} is not supported; these are: {classes}.")
    return name, family


def _refuse_unsupported(content: Mapping[str, Any], family: ConvertedFamily) -> None:
    """Refuses every field that changes the computation, or that might."""
    fixed = {**FIXED, **family.fixed}
    known = {field.hf for field in family.fields} | HARMLESS | family.harmless
    if any(field.hf == "rms_norm_eps" for field in family.fields):
        known.update(_ROPE_FIELDS)
    for name, value in content.items():
        if name in fixed:
            allowed = fixed[name]
            if not any(value == right and type(value) is type(right) for right in allowed):
                raise UserError(
                    f"{name} is {value!r}, which is not supported; only {allowed[0]!r} is."
                )
        elif name not in known:
            raise UserError(
                f"{name} ({value!r}) is an unknown field, and it might change what the model "
                f"computes. If you know that it does not, remove it from the file."
            )


def _value(content: Mapping[str, Any], field: Field) -> Any:
    if field.hf not in content:
        if field.required:
            raise UserError(f"{field.hf} is missing.")
        return field.default
    value = content[field.hf]
    if value is None and not field.required and field.default is None:
        return None
    if field.kind is float and type(value) is int:
        return float(value)
    if type(value) is not field.kind:
        raise UserError(f"{field.hf} is {value!r}; expected {field.kind.__name__}.")
    return value


def _rope_theta(content: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies; every kind of scaling of them is refused."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        section = content.get(name)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise UserError(f"{name} is {section!r}; expected fields.")
        for key, value in section.items():
            path = f"{name}.{key}"
            if key == "rope_theta":
                found.append((path, value))
            elif key in ("rope_type", "type"):
                if value != "default":
                    raise UserError(f"{path} is {value!r}, which is not supported.")
            elif key != "partial_rotary_factor" or value != 1.0:
                raise UserError(f"{path} is {value!r}, which is not supported.")
    if content.get("rope_theta") is not None:
        found.append(("rope_theta", content["rope_theta"]))
    for name, value in found:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} is {value!r}; expected a number.")
        if value != found[0][1]:
            raise UserError(f"{found[0][0]} is {found[0][1]}, but {name} is {value}.")
    return float(found[0][1]) if found else 10000.0  # the default of LlamaConfig and Olmo2Config
