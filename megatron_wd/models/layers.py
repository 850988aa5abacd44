"""Layers for machines without Transformer Engine, and the loss that every family shares.

They keep Megatron Core's modules (parallel linear layers, their checkpoints and their communication) and
replace what its reference implementations do slowly or not at all: attention from the packed projection
(`attention.py`), norms of queries, keys and outputs, SwiGLU without copies.

Shapes: s sequence, b micro-batch, h hidden, n query heads here, d channels per head, f MLP width here.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_wd.models import functions
from megatron_wd.models.attention import causal_attention, packed_causal_attention
from megatron_wd.models.norms import HeadsRMSNorm


class NoCoreAttention(nn.Module):
    """Fills the slot of Megatron's core attention: `CausalSelfAttention` calls the kernel itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class QueryKeyNorms(SelfAttention):
    """Self-attention whose queries and keys are normed, each over all of its heads (OLMo-2)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        eps = self.config.layernorm_epsilon
        queries = self.num_attention_heads_per_partition * head
        keys = self.num_query_groups_per_partition * head
        self.q_norm = HeadsRMSNorm(self.config, queries, eps, group)
        self.k_norm = HeadsRMSNorm(self.config, keys, eps, group)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, which its own forward pass calls before the rotary embedding."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)  # type: ignore[misc]
        return self.q_norm(query), self.k_norm(key), value


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
        dropout = self.config.attention_dropout if self.training else 0.0
        # Heads are divided over tensor-parallel ranks: each rank must drop others than its neighbour.
        streams = get_cuda_rng_tracker().fork() if dropout > 0.0 else nullcontext()  # type: ignore[union-attr]
        with streams:
            out = self.attend(packed_qkv, rotary_pos_emb, dropout)
        return self.linear_proj(out)

    def attend(self, packed_qkv: Tensor, angles: Tensor | None, dropout: float) -> Tensor:
        """packed_qkv: [s, b, g * (r + 2) * d], per KV head its r query heads, key, value; angles of
        the rotary embedding [s, 1, 1, d], or None -> [s, b, n * d]."""
        groups, head = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        rotary = None if angles is None else _cos_and_sin(angles)
        normed = isinstance(self, QueryKeyNorms)
        if rotary is not None and not normed:
            return packed_causal_attention(
                packed_qkv, *rotary, num_groups=groups, head_dim=head, dropout_p=dropout
            )
        packed = packed_qkv.view(*packed_qkv.shape[:2], groups, -1, head)
        q, k, v = packed.split([packed.shape[3] - 2, 1, 1], dim=3)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))  # [s, b, heads, d]
        if normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = functions.apply_rotary(q, *rotary), functions.apply_rotary(k, *rotary)
        return causal_attention(q, k, v, dropout)


def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles.view(-1, angles.shape[-1])
    return angles.cos(), angles.sin()


@functools.cache
def with_query_key_norms(attention: type[SelfAttention]) -> type[SelfAttention]:
    """A self-attention, ours or Megatron's, with `QueryKeyNorms`."""
    if attention is SelfAttention:
        return QueryKeyNorms
    return type(f"QueryKeyNorms{attention.__name__}", (attention, QueryKeyNorms), {})  # pyright: ignore


@functools.cache
def with_output_norm(linear: type[nn.Module], norm: type[nn.Module]) -> type[nn.Module]:
    """A linear layer whose output is normed, before it joins the residual stream (OLMo-2)."""

    class NormedOutput(linear):  # type: ignore[misc,valid-type]
        """Row-parallel linear layer, then a norm over what all ranks have added up."""

        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = norm(
                config=config, hidden_size=output_size, eps=config.layernorm_epsilon
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            """x: [s, b, this rank's inputs] -> [s, b, h] (or [s/tp, b, h])."""
            out, bias = super().forward(x)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_layernorm(out), None

    return NormedOutput


def gelu(x: Tensor) -> Tensor:
    """The GELU of GPT-2: its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


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

    def __init__(
        self, *args: Any, unpadded_vocab_size: int, z_loss: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.unpadded_vocab_size, self.z_loss = unpadded_vocab_size, z_loss

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy, and in training the z-loss where there is one.

        Args:
            labels: [b, s].
            logits: [s, b, padded vocabulary / tp].

        Returns:
            fp32 [parts, b, s]: the cross entropy in nats, and `z_loss` times the squared logarithm of
            the softmax's denominator.
        """
        classes = logits.shape[-1]
        group = self.pg_collection.tp
        loss, log_z = functions.vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1),
            first_id=group.rank() * classes,
            vocab_size=self.unpadded_vocab_size,
            group=group if group.size() > 1 else None,
            reuse_logits=True,  # nothing else reads them
        )
        parts = [loss]
        if self.z_loss > 0.0 and self.training:
            parts.append(self.z_loss * log_z.square())
        return torch.stack(parts).transpose(1, 2)
