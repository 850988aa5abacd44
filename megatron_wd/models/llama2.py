"""Llama-2: RMSNorm before each sublayer, SwiGLU, rotary positions, grouped-query attention, no biases.

Source: Touvron et al., "Llama 2", arXiv 2307.09288; sizes as in the weight-decay study (arXiv 2602.11137).
A Llama block is two HybridModel layers, attention `*` and MLP `-`.
"""

from __future__ import annotations

import functools

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_wd.models.layers import (
    CausalSelfAttention,
    NoCoreAttention,
    NormedStack,
    RMSNorm,
    SwiGluMLP,
)

BLOCK_PATTERN = "*-"
TRANSFORMER_OPTIONS = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
POSITIONS = "rope"


def stack_spec(*, use_transformer_engine: bool) -> ModuleSpec:
    """What the layers are made of: Transformer Engine's modules, or ours over torch kernels."""
    return _transformer_engine_spec() if use_transformer_engine else _local_spec()


def _local_spec() -> ModuleSpec:
    # Transformer Engine fuses a norm into the linear layer behind it and names it so in checkpoints;
    # the key map gives ours the same names, so that a checkpoint moves between the two.
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=CausalSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=NoCoreAttention,
                    linear_proj=RowParallelLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
            },
        ),
    )
    mlp = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp_builder(SwiGluMLP, ColumnParallelLinear, RowParallelLinear),
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )
    return _stack(attention, mlp, RMSNorm)


def _transformer_engine_spec() -> ModuleSpec:
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=TELayerNormColumnParallelLinear,
                    core_attention=TEDotProductAttention,
                    linear_proj=TERowParallelLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        ),
    )
    mlp = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=_mlp_builder(MLP, TELayerNormColumnParallelLinear, TERowParallelLinear),
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        ),
    )
    return _stack(attention, mlp, TENorm)


def _mlp_builder(module: type[MLP], linear_fc1: type, linear_fc2: type):
    submodules = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    return functools.partial(module.as_mlp_submodule, submodules)


def _stack(attention: ModuleSpec, mlp: ModuleSpec, final_norm: type) -> ModuleSpec:
    return ModuleSpec(
        module=NormedStack,
        params={"final_norm": final_norm},
        submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp),
    )
