"""Global parameter names: the same on every layout and layer implementation.

On a pipeline stage Megatron counts layers from 0 again and wrappers add `module.`. Anything keyed by name
(initial weights, decay, reports) uses the name in the checkpoint instead, as the converter does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

# Norms stand alone in our layers and inside the next linear layer in Transformer Engine's.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")


def global_name(local_name: str, first_layer: int) -> str:
    """The checkpoint's name of a parameter, from its local name and the chunk's first layer (from 0)."""
    name = local_name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = match.group(2)
    for own, fused in _NORMS.items():
        if rest.startswith(own):
            rest = fused + rest.removeprefix(own)
    return f"decoder.layers.{first_layer + int(match.group(1))}.{rest}"


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside data-parallel and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def named_parameters(model: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (global name, parameter) over this rank's chunks.

    A tied embedding exists on the first and on the last pipeline stage; both copies have the first
    one's name.
    """
    for chunk in model:
        inner = unwrap(chunk)
        layers = inner.decoder.layers  # type: ignore[union-attr]
        first_layer = layers[0].layer_number - 1 if len(layers) else 0  # type: ignore[arg-type,index]
        tied = inner.share_embeddings_and_output_weights
        for local_name, param in inner.named_parameters():
            name = global_name(local_name, first_layer)
            if tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            yield name, param
