"""Norms of the model families: right under tensor and sequence parallelism.

Under sequence parallelism each tensor-parallel rank sees a part of the sequence, so the gradient of a
replicated gain must be summed over ranks; Megatron does that for parameters marked `sequence_parallel`.

Shapes: s sequence, b micro-batch, h hidden, n heads on this rank, e channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_wd.models import functions


def _replicated(values: Tensor, config: TransformerConfig) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole."""
    parameter = nn.Parameter(values.to(config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class RMSNorm(nn.Module):
    """RMSNorm over the hidden size, with a learned gain."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(torch.ones(hidden_size), config)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, h] -> [s, b, h]."""
        return functions.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm over the hidden size, with a learned gain and bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(torch.ones(hidden_size), config)
        self.bias = _replicated(torch.zeros(hidden_size), config)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, h] -> [s, b, h]."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class _JointRMSNorm(torch.autograd.Function):
    """RMSNorm over channels that are divided over ranks: the sum of squares is, and so its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        square_sum = x.to(wide).square().sum(dim=-1, keepdim=True)
        dist.all_reduce(square_sum, group=group)
        rstd = square_sum.div_(x.shape[-1] * group.size()).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.group = group
        return (x * rstd * weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        unit = x * rstd  # fp32 where x is bf16
        along_x = (d_out * unit * weight).sum(dim=-1, keepdim=True)
        dist.all_reduce(along_x, group=ctx.group)
        d_weight = (d_out * unit).flatten(0, -2).sum(dim=0)
        along_x.div_(x.shape[-1] * ctx.group.size())
        dx = rstd * (d_out * weight - unit * along_x)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None, None


class HeadsRMSNorm(nn.Module):
    """RMSNorm of queries or keys over all heads together, which are divided over ranks (OLMo-2).

    It must not be called `q_layernorm` or `k_layernorm`: Megatron sums the gradients of those over
    tensor-parallel ranks, which is right for a norm of each head alone and wrong for this one.

    Source: OLMo team, "2 OLMo 2 Furious", arXiv 2501.00656, section 2.1.
    """

    def __init__(
        self, config: TransformerConfig, channels: int, eps: float, group: dist.ProcessGroup
    ) -> None:
        """Makes the gain of this rank's `channels`, a part of those of all ranks in `group`."""
        super().__init__()
        self.eps, self.group = eps, group
        self.weight = nn.Parameter(torch.ones(channels, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 0  # type: ignore[attr-defined]
        self.weight.partition_stride = 1  # type: ignore[attr-defined]

    def forward(self, heads: Tensor) -> Tensor:
        """heads: [s, b, n, e] -> [s, b, n, e]."""
        x = heads.flatten(-2)
        if self.group.size() == 1:
            return functions.rms_norm(x, self.weight, self.eps).view(heads.shape)
        return _JointRMSNorm.apply(x, self.weight, self.eps, self.group).view(heads.shape)  # type: ignore[union-attr]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """What Megatron saves: the gain is divided over ranks along axis 0."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
