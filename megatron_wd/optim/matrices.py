"""The matrices of a model, as this rank holds them: in pieces, summed over ranks by matrix.

Megatron packs query, key and value in one tensor and gate and up in another; tensor parallelism divides
rows or columns, and the distributed optimizer cuts what is left anywhere. Here every fp32 master weight
becomes pieces that lie within one matrix, so that a sum over a matrix is a sum over pieces here and one
reduction over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor, nn

from megatron_wd.config import ModelConfig
from megatron_wd.models.init import whole_shape
from megatron_wd.models.names import named_parameters

_KINDS = {
    "self_attention.linear_qkv": ("q", "k", "v"),
    "self_attention.linear_proj": ("proj",),
    "mlp.linear_fc2": ("fc2",),
    "embedding.word_embeddings": ("embedding",),
    "embedding.position_embeddings": ("positions",),
    "output_layer": ("head",),
}


@dataclass(frozen=True)
class Matrix:
    """A matrix (or vector) as the model uses it.

    Attributes:
        name: `layers.3.q` for block 3's query projection, `embedding`, `layers.3.q_bias`, ...
        kind: "q", "k", "v", "proj", "fc1_gate", "fc1_up", "fc1", "fc2", "embedding", "positions", "head",
            "norm" or "bias".
        block: number of its transformer block, from 0; None outside of blocks.
        parameter: global name of the tensor that holds it.
        numel: values in it.
    """

    name: str
    kind: str
    block: int | None
    parameter: str
    numel: int

    @property
    def is_hidden(self) -> bool:
        """Whether it is a matrix of attention or MLP, whose step size the effective rate describes."""
        return self.kind in ("q", "k", "v", "proj", "fc1_gate", "fc1_up", "fc1", "fc2")


def kinds_of(parameter: str, model: ModelConfig) -> tuple[str, ...]:
    """The kinds of matrices that a parameter holds, in the order of `row_kinds`."""
    if parameter.endswith("bias"):
        return ("bias",)
    if "norm" in parameter:
        return ("norm",)
    if ".mlp.linear_fc1." in parameter:
        return ("fc1_gate", "fc1_up") if model.facts.gated_mlp else ("fc1",)
    return next(kinds for part, kinds in _KINDS.items() if f"{part}." in parameter)


def row_kinds(kinds: tuple[str, ...], rows: int, model: ModelConfig) -> Tensor:
    """Which of a parameter's kinds each row of a rank's part belongs to: int64 [rows].

    Query, key and value lie together per KV head; gate and up one after the other, on each rank.
    """
    if kinds == ("q", "k", "v"):
        head = model.head_size
        queries = model.num_attention_heads // model.kv_heads * head
        pattern = torch.tensor([0] * queries + [1] * head + [2] * head)
        return pattern.repeat(rows // len(pattern))
    return torch.arange(len(kinds)).repeat_interleave(rows // len(kinds))


def list_matrices(shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> list[Matrix]:
    """Every matrix of a model, in the order of its parameters.

    Args:
        shapes: global name -> shape of the whole tensor, of all ranks together.
        model: the model.
    """
    matrices = []
    for parameter, shape in shapes.items():
        kinds = kinds_of(parameter, model)
        parts = parameter.split(".")
        block = int(parts[2]) // 2 if parts[:2] == ["decoder", "layers"] else None
        rows = torch.bincount(row_kinds(kinds, shape[0], model), minlength=len(kinds)).tolist()
        for kind, count in zip(kinds, rows, strict=True):
            numel = count * (shape[1] if len(shape) > 1 else 1)
            matrices.append(Matrix(_name(parameter, kind, block), kind, block, parameter, numel))
    return matrices


def _name(parameter: str, kind: str, block: int | None) -> str:
    if kind in ("norm", "bias"):
        short = parameter.split(".", 3)[-1] if block is not None else parameter
        return short if block is None else f"layers.{block}.{short}"
    return kind if block is None else f"layers.{block}.{kind}"


def global_shapes(model: list[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Global name and whole shape of this rank's parameters."""
    return {name: whole_shape(param) for name, param in named_parameters(model)}


def gather_shapes(model: list[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Global name and whole shape of the whole model's parameters; the same on every rank. Collective."""
    parts: list[dict[str, tuple[int, ...]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, global_shapes(model))
    return merge_shapes(part for part in parts if part is not None)


def merge_shapes(parts: Iterable[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The shapes of several ranks together, each parameter once."""
    whole: dict[str, tuple[int, ...]] = {}
    for name, shape in (item for part in parts for item in part.items()):
        assert whole.setdefault(name, shape) == shape, f"ranks disagree about {name}"
    return whole


@dataclass(frozen=True)
class Master:
    """An fp32 master weight on this rank.

    Attributes:
        parameter: global name.
        weight: what the optimizer updates; a flat part of the model's parameter under the distributed
            optimizer, else shaped like it. Its gradient is `weight.grad`, between `prepare_grads` and
            the update.
        rows: rows of this rank's parameter, before any cutting by the distributed optimizer.
        columns: its columns, 1 for a vector.
        start: where `weight` begins in the flattened parameter.
        is_counted: whether this rank, among those that hold the same values, counts them in a sum.
    """

    parameter: str
    weight: Tensor
    rows: int
    columns: int
    start: int
    is_counted: bool


def master_weights(model: list[nn.Module], optimizer: MegatronOptimizer) -> Iterator[Master]:
    """This rank's master weights, whatever optimizer of Megatron holds them."""
    names = {id(param): name for name, param in named_parameters(model)}
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        is_cut = isinstance(one, DistributedOptimizer)
        for param, weight in _pairs(one):
            start = one._get_model_param_range_map(param)["param"].start if is_cut else 0
            whole_here = getattr(param, "tensor_model_parallel", False) or tensor_rank == 0
            yield Master(
                parameter=names[id(param)],
                weight=weight,
                rows=param.shape[0],
                columns=param.numel() // param.shape[0],
                start=start,
                is_counted=(
                    whole_here and (is_cut or first_copy) and not getattr(param, "shared", False)
                ),
            )


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Tensor]]:
    """(model parameter, master weight)."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif isinstance(optimizer, FP32Optimizer):
        params = [group["params"] for group in optimizer.param_groups]
        groups = [(params, params)]
    else:
        groups = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    for theirs, ours in groups:
        for params, masters in zip(theirs, ours, strict=True):
            yield from zip(params, masters, strict=True)


@dataclass(frozen=True)
class Piece:
    """A part of a master weight that lies within one matrix.

    Attributes:
        master: index of the master weight in the list that the pieces were made from.
        first, last: its place in the flattened master weight.
        matrix: number of the matrix.
    """

    master: int
    first: int
    last: int
    matrix: int

    def of(self, flat: Tensor) -> Tensor:
        """This piece of a flat tensor laid out like the master weight, a view."""
        return flat[self.first : self.last]


def cut_into_pieces(
    masters: Iterable[Master], matrices: list[Matrix], model: ModelConfig, block_values: int
) -> list[Piece]:
    """Divides master weights into blocks of at most `block_values` values of one matrix."""
    first_matrix: dict[str, int] = {}
    for number, matrix in enumerate(matrices):
        first_matrix.setdefault(matrix.parameter, number)
    pieces = []
    for index, master in enumerate(masters):
        kinds = row_kinds(kinds_of(master.parameter, model), master.rows, model)
        end = master.start + master.weight.numel()
        row = 0
        for kind, count in zip(*torch.unique_consecutive(kinds, return_counts=True), strict=True):
            begin = max(master.start, row * master.columns)
            row += int(count)
            stop = min(end, row * master.columns)
            for first in range(begin, stop, block_values):
                place = (first - master.start, min(first + block_values, stop) - master.start)
                pieces.append(Piece(index, *place, first_matrix[master.parameter] + int(kind)))
    return pieces


class MatrixSums:
    """Adds up values of pieces by matrix, over all ranks."""

    def __init__(self, num_values: int, num_matrices: int, device: torch.device) -> None:
        """Starts `num_values` sums for each matrix at zero."""
        self._sums = torch.zeros(num_values, num_matrices, dtype=torch.float64, device=device)
        self._matrices: list[int] = []
        self._values: list[Tensor] = []

    def add(self, piece: Piece, *values: Tensor) -> None:
        """Adds a value of a piece to each of the sums of its matrix."""
        self._matrices.append(piece.matrix)
        self._values.extend(values)

    def over_ranks(self) -> Tensor:
        """The sums of all ranks: float64 [values, matrices]. Collective."""
        if self._values:
            index = torch.tensor(self._matrices, device=self._sums.device)
            values = torch.stack(self._values).double().view(len(index), -1).t()
            self._sums.index_add_(1, index, values)
        dist.all_reduce(self._sums)
        return self._sums
