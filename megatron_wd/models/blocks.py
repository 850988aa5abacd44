"""What the blocks of a family are made of, from its facts: our own layers, or Transformer Engine's.

A block is two HybridModel layers, attention `*` and MLP `-`. Transformer Engine fuses a norm into the
linear layer behind it and names it so in checkpoints; a key map gives ours the same names, so that a
checkpoint moves between the two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
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
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_wd.config.families import Family
from megatron_wd.models.layers import (
    CausalSelfAttention,
    NoCoreAttention,
    NormedStack,
    SwiGluMLP,
    gelu,
    with_output_norm,
    with_query_key_norms,
)
from megatron_wd.models.norms import LayerNorm, RMSNorm

BLOCK_PATTERN = "*-"


def transformer_options(facts: Family) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that a family decides."""
    return {
        "normalization": "RMSNorm" if facts.norm == "rms" else "LayerNorm",
        "gated_linear_unit": facts.gated_mlp,
        "activation_func": F.silu if facts.gated_mlp else gelu,
        "add_bias_linear": facts.biases,
    }


def stack_spec(facts: Family, *, use_transformer_engine: bool) -> ModuleSpec:
    """The layers of a family, for HybridModel."""
    return _transformer_engine_spec(facts) if use_transformer_engine else _local_spec(facts)


def _local_spec(facts: Family) -> ModuleSpec:
    norm = RMSNorm if facts.norm == "rms" else LayerNorm
    before = facts.norm_place == "before"
    output_linear = RowParallelLinear if before else with_output_norm(RowParallelLinear, norm)
    return _stack(
        facts,
        attention=CausalSelfAttention,
        core_attention=NoCoreAttention,
        input_linear=ColumnParallelLinear,
        output_linear=output_linear,
        mlp=SwiGluMLP if facts.gated_mlp else MLP,
        norm_before=norm if before else IdentityOp,
        final_norm=norm,
        keys={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )


def _transformer_engine_spec(facts: Family) -> ModuleSpec:
    before = facts.norm_place == "before"
    return _stack(
        facts,
        attention=SelfAttention,
        core_attention=TEDotProductAttention,
        input_linear=TELayerNormColumnParallelLinear if before else TEColumnParallelLinear,
        output_linear=(
            TERowParallelLinear if before else with_output_norm(TERowParallelLinear, TENorm)  # type: ignore[arg-type]
        ),
        mlp=MLP,
        norm_before=IdentityOp,  # fused into the linear layer behind it
        final_norm=TENorm,
        keys={},
    )


def _stack(
    facts: Family,
    *,
    attention: type,
    core_attention: type,
    input_linear: type,
    output_linear: type,
    mlp: type[MLP],
    norm_before: type,
    final_norm: type,
    keys: dict[str, str],
) -> ModuleSpec:
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=ModuleSpec(
                module=with_query_key_norms(attention) if facts.qk_norm else attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=input_linear,
                    core_attention=core_attention,
                    linear_proj=output_linear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map=keys,
        ),
    )
    linears = MLPSubmodules(linear_fc1=input_linear, linear_fc2=output_linear)
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm_before,
            mlp=functools.partial(mlp.as_mlp_submodule, linears),
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map=keys,
        ),
    )
    return ModuleSpec(
        module=NormedStack,
        params={"final_norm": final_norm},
        submodules=HybridStackSubmodules(attention_layer=attention_layer, mlp_layer=mlp_layer),
    )
