"""Megatron-LM's own checkpoints of GPTModel: what they say of themselves, and their names.

The arguments of the run lie beside the tensors, as a pickled `argparse.Namespace` with enums, dtypes
and functions in it. It is read as inert records (`pickles.py`), and mapped strictly: an argument that
would change the computation has the value that our models have, or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import ModelConfig, UserError
from megatron_wd.convert.dcp import METADATA, TensorFolder
from megatron_wd.convert.pickles import Record, read_archive
from megatron_wd.convert.shape import check_shape

_COMMON_FILE, _COMMON_OBJECT = "common.pt", "common_state/shard_0_1"

# Values that our models have, where an argument changes the computation. Megatron-LM's default is
# among them, so an argument that an older version did not have is fine.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "add_qkv_bias": (False,),
    "num_experts": (None,),
    "multi_latent_attention": (False,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False,),
    "no_rope_freq": (None,),
    "mrope_section": (None,),
    "add_position_embedding": (True,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "window_size": (None,),
    "window_attn_skip_freq": (None,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "openai_gelu": (False,),
    "onnx_safe": (None, False),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "use_te_activation_func": (False,),
    "use_mup": (False,),
    "num_residual_streams": (None, 1),
    "enable_hyper_connections": (False,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (False,),
    "use_legacy_models": (False,),
    "spec": (None,),
}
# By whether the MLP is gated: the family, and what else it has.
_FAMILIES: Mapping[bool, tuple[str, Mapping[str, tuple[Any, ...]]]] = {
    True: (
        "llama2",
        {
            "normalization": ("RMSNorm",),
            "position_embedding_type": ("rope",),
            "add_bias_linear": (False,),
        },
    ),
    False: (
        "gpt2",
        {
            "normalization": ("LayerNorm",),
            "position_embedding_type": ("learned_absolute",),
            "add_bias_linear": (True,),
            # The fused GELU is the approximation by tanh; the other one is exact.
            "bias_gelu_fusion": (True,),
        },
    ),
}


@dataclass(frozen=True)
class MegatronRun:
    """What Megatron-LM saved beside the tensors.

    Attributes:
        arguments: The arguments of the run by name.
        step: Iterations done, or None.
    """

    arguments: Mapping[str, Any]
    step: int | None

    def provenance(self) -> dict[str, Any]:
        """The facts of the run that an export passes on."""
        wanted = {"lr": "learning_rate", "weight_decay": "weight_decay", "seed": "seed"}
        facts = {ours: self._number(theirs) for theirs, ours in wanted.items()}
        samples, length = self._number("consumed_train_samples"), self._number("seq_length")
        if isinstance(samples, int) and isinstance(length, int):
            facts["tokens"] = samples * length
        return {"source": "Megatron-LM", **{k: v for k, v in facts.items() if v is not None}}

    def _number(self, name: str) -> int | float | None:
        value = self.arguments.get(name)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return value if plain else None


def read_run(folder: Path) -> MegatronRun | None:
    """Reads the arguments of the run that wrote a checkpoint; None if there are none.

    Raises:
        UserError: If what should hold them is damaged, or it is a checkpoint in the old format.
    """
    if not (folder / METADATA).is_file() and any(folder.glob("mp_rank_*")):
        raise UserError(
            f"{folder} is a checkpoint in Megatron-LM's old format (torch). Convert it there with "
            f"--ckpt-convert-format torch_dist."
        )
    path = folder / _COMMON_FILE
    if path.is_file():
        try:
            with path.open("rb") as file:
                common = read_archive(file)
        except Exception as error:
            raise UserError(f"{path} is damaged: {error or type(error).__name__}.") from error
    else:
        if not (folder / METADATA).is_file():
            return None
        tensors = TensorFolder(folder)
        if _COMMON_OBJECT not in tensors.objects:
            return None
        common = tensors.read_object(_COMMON_OBJECT)
        common = common[0] if isinstance(common, list) and common else None
    common = common if isinstance(common, dict) else {}
    arguments = common.get("args")
    if not isinstance(arguments, Record) or not isinstance(arguments.state, dict):
        return None
    step = common.get("iteration")
    return MegatronRun(arguments.state, step if isinstance(step, int) else None)


def shape_from_arguments(arguments: Mapping[str, Any], place: str) -> ModelConfig:
    """Returns the shape of a model from Megatron-LM's arguments.

    Args:
        arguments: By name.
        place: Where they come from, for messages.

    Raises:
        UserError: If an argument asks for something that our models do not compute; it is named.
    """
    arguments = dict(arguments)
    if arguments.get("use_rotary_position_embeddings") is True:
        arguments["position_embedding_type"] = "rope"  # how older versions spelt it
    read = _Reader(arguments, place)
    for name, allowed in _FIXED.items():
        if name in arguments:
            read.expect(name, allowed)
    family, expected = _FAMILIES[read.get("swiglu", bool)]
    for name, allowed in expected.items():
        read.expect(name, allowed, f" in a {family} model")
    grouped = arguments.get("group_query_attention") is True
    padded = read.get("padded_vocab_size", int)
    vocab = arguments.get("vocab_size")
    model = ModelConfig(
        family=family,
        num_layers=read.get("num_layers", int),
        hidden_size=read.get("hidden_size", int),
        ffn_hidden_size=read.get("ffn_hidden_size", int),
        num_attention_heads=read.get("num_attention_heads", int),
        num_query_groups=read.get("num_query_groups", int) if grouped else None,
        head_dim=read.get("kv_channels", int),
        vocab_size=vocab if type(vocab) is int and 0 < vocab <= padded else padded,
        max_positions=read.get("max_position_embeddings", int),
        norm_eps=read.eps(),
        rope_theta=float(read.get("rotary_base", (int, float), 10000)),
        tie_embeddings=not read.get("untie_embeddings_and_output_weights", bool),
    )
    try:
        check_shape(model)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return model


class _Reader:
    """Arguments by name, with messages that say where they come from."""

    def __init__(self, arguments: Mapping[str, Any], place: str):
        self._arguments, self._place = arguments, place

    def expect(self, name: str, allowed: Sequence[Any], where: str = "") -> None:
        if name not in self._arguments:
            raise self._error(f"{name} is missing, which decides what the model computes")
        value = self._arguments[name]
        if not any(value == right and type(value) is type(right) for right in allowed):
            raise self._error(
                f"{name} is {value!r}, which is not supported{where}; only {allowed[0]!r} is"
            )

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._arguments.get(name, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            raise self._error(f"{name} is {value!r}; expected {kinds[0].__name__}")
        return value

    def eps(self) -> float:
        names = [n for n in ("layernorm_epsilon", "norm_epsilon") if n in self._arguments]
        values = {self.get(name, float) for name in names}
        if len(values) != 1:
            raise self._error("norm_epsilon is missing, or there are two of them")
        return values.pop()

    def _error(self, message: str) -> UserError:
        return UserError(f"{self._place}: the arguments that Megatron-LM saved: {message}.")


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


def is_gpt_model(names: Mapping[str, Any]) -> bool:
    """Whether the tensors of a checkpoint are named as Megatron's GPTModel names them."""
    return "decoder.final_layernorm.weight" in names


def gpt_names(names: Sequence[str]) -> list[tuple[str, int | None]]:
    """Returns the names that a tensor of ours may have in a GPTModel.

    Its layers are whole blocks: layer i is our attention 2i and our MLP 2i+1. Layers that are all
    alike are stored as one tensor with an axis of layers in front.

    Args:
        names: Names of the tensor in our checkpoints.

    Returns:
        Name and index on the axis of layers, or None where it has no such axis.
    """
    found: list[tuple[str, int | None]] = []
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is None:
            found.append((name.replace("decoder.final_norm.", "decoder.final_layernorm."), None))
            continue
        layer = int(match[1]) // 2
        found.append((f"decoder.layers.{layer}.{match[2]}", None))
        found.append((f"decoder.layers.{match[2]}", layer))
    return found
