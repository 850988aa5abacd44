"""Layers for machines without Transformer Engine, and the loss that every family shares.

They keep Megatron Core's modules (parallel linear layers, their checkpoints and their communication) and
replace what its reference implementations do slowly or not at all: a norm that works under sequence
parallelism, attention from the packed projection (`attention.py`), SwiGLU without copies.

Shapes: s sequence, b micro-batch, h hidden, n query heads here, d channels per head, f MLP width here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_wd.models import functions
from megatron_wd.models.attention import packed_causal_attention


class RMSNorm(nn.Module):
    """RMSNorm with a learned gain, right under sequence parallelism.

    Under sequence parallelism each tensor-parallel rank sees a part of the sequence, so the gain's
    gradient must be summed over ranks; Megatron does that for weights marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, h] -> [s, b, h]."""
        return functions.rms_norm(x, self.weight, self.eps)


class NoCoreAttention(nn.Module):
    """Fills the slot of Megatron's core attention: `CausalSelfAttention` calls the kernel itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class CausalSelfAttention(SelfAttention):
    """Megatron's self-attention with rotary embedding and causal attention from `attention.py`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [s, b, h] (or [s/tp, b, h]) -> the projected output in the same layout."""
        packed_qkv, _bias = self.linear_qkv(hidden_states)
        angles = rotary_pos_emb.view(-1, self.hidden_size_per_attention_head)
        dropout = self.config.attention_dropout if self.training else 0.0
        # Heads are divided over tensor-parallel ranks: each rank must drop others than its neighbour.
        streams = get_cuda_rng_tracker().fork() if dropout > 0.0 else nullcontext()  # type: ignore[union-attr]
        with streams:
            out = packed_causal_attention(
                packed_qkv,
                angles.cos(),
                angles.sin(),
                num_groups=self.num_query_groups_per_partition,
                head_dim=self.hidden_size_per_attention_head,
                dropout_p=dropout,
            )
        return self.linear_proj(out)


class SwiGluMLP(MLP):
    """Megatron's MLP with SwiGLU in one memory pass each way."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [s, b, h] -> [s, b, h]."""
        gate_up, _bias = self.linear_fc1(hidden_states)  # [s, b, 2 f]  # type: ignore[arg-type]
        return self.linear_fc2(functions.swiglu(gate_up))  # type: ignore[arg-type]


class NormedStack(HybridStack):
    """HybridStack with the final norm of our own spec: the parent hard-codes Transformer Engine's."""

    def __init__(self, *args: Any, final_norm: type[nn.Module], **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(
                config=self.config,
                hidden_size=self.config.hidden_size,
                eps=self.config.layernorm_epsilon,
            )


class CausalLM(HybridModel):
    """The one model class: HybridModel with a loss over exactly `vocab_size` classes.

    Megatron pads the vocabulary so that it divides over ranks. Padded classes would take part in the
    softmax and make the loss depend on how many there are, so the loss leaves them out.
    """

    def __init__(self, *args: Any, unpadded_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unpadded_vocab_size = unpadded_vocab_size

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [b, s], logits [s, b, padded vocabulary / tp] -> cross entropy in nats, fp32 [b, s]."""
        classes = logits.shape[-1]
        group = self.pg_collection.tp
        loss = functions.vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1),
            first_id=group.rank() * classes,
            vocab_size=self.unpadded_vocab_size,
            group=group if group.size() > 1 else None,
            reuse_logits=True,  # nothing else reads them
        )
        return loss.transpose(0, 1)
