"""Initial weights that do not depend on the layout.

Megatron draws them on each rank, so they change with the number of pipeline stages and of tensor-parallel
ranks. Here every *whole* tensor is drawn from (seed, global name) and each rank takes its part.
"""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_wd.config import Config
from megatron_wd.models.names import named_parameters

_VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


def weight_std(name: str, config: Config) -> float:
    """Standard deviation of the initial weights of a matrix.

    "scaled" (GPT-NeoX; the weight-decay study's code, arXiv 2602.11137): sqrt(2 / (5 d)), output
    projections 1 / (sqrt(d) num_layers). "normal" (GPT-2): init_std, output projections divided by
    sqrt(2 num_layers). "truncated_normal" (OLMo-2): init_std everywhere.
    """
    model = config.model
    is_output = name.endswith(_OUTPUT_PROJECTIONS)
    if model.init == "scaled":
        if is_output:
            return 1.0 / (math.sqrt(model.hidden_size) * model.num_layers)
        return math.sqrt(2.0 / (5.0 * model.hidden_size))
    if model.init == "truncated_normal":
        return model.init_std
    return model.init_std / math.sqrt(2.0 * model.num_layers) if is_output else model.init_std


def full_tensor(
    name: str, shape: tuple[int, ...], seed: int, std: float, *, truncated: bool = False
) -> Tensor:
    """Draws a whole tensor, fp32 on the CPU, from (seed, name) alone; truncated at 3 std if wanted."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.empty(shape)
    if truncated:
        return nn.init.trunc_normal_(values, 0.0, std, -3.0 * std, 3.0 * std, generator=generator)
    return values.normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialize_weights(model: list[nn.Module], config: Config) -> None:
    """Fills this rank's parameters: matrices normal, norm gains one, biases zero.

    Padding rows of the vocabulary are zero and stay so, since they take no part in the loss: norms of the
    tables are those of the model's own rows.
    """
    for name, param in named_parameters(model):
        if param.dim() == 1:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        whole = full_tensor(
            name,
            whole_shape(param),
            config.seed,
            weight_std(name, config),
            truncated=config.model.init == "truncated_normal",
        )
        if name in _VOCABULARY_TABLES:
            whole[config.model.vocab_size :] = 0.0
        copy_part(param, whole)


def whole_shape(param: nn.Parameter) -> tuple[int, ...]:
    """Shape of a parameter over all tensor-parallel ranks."""
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        size = parallel_state.get_tensor_model_parallel_world_size()
        shape[param.partition_dim] *= size  # type: ignore[attr-defined]
    return tuple(shape)


@torch.no_grad()
def copy_part(param: nn.Parameter, whole: Tensor) -> None:
    """Copies this tensor-parallel rank's part of a whole tensor into a parameter."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    divided = getattr(param, "tensor_model_parallel", False) and size > 1
    param.copy_(tensor_parallel_part(whole, param, rank, size) if divided else whole)


def tensor_parallel_part(whole: Tensor, param: nn.Parameter, rank: int, size: int) -> Tensor:
    """This rank's part of a whole tensor, as Megatron divides it.

    With stride k the dimension holds k tensors one after the other (SwiGLU: gate, up); each is divided
    on its own, and a rank keeps its parts together.
    """
    dim: int = param.partition_dim  # type: ignore[attr-defined]
    stride: int = getattr(param, "partition_stride", 1)
    pieces = torch.chunk(whole, size * stride, dim=dim)
    return torch.cat(pieces[rank::size], dim=dim)
