"""GPT-2: `GPT2LMHeadModel`. Matrices are [in, out] there, queries, keys and values one tensor."""

from megatron_wd.convert.families.base import ConvertedFamily, Field
from megatron_wd.convert.packing import (
    FUSED_PER_GROUP,
    PADDED_ROWS,
    STACKED,
    TRANSPOSED,
    Packing,
    Part,
    Rule,
)

_A, _M, _BLOCK = "decoder.layers.{attention}", "decoder.layers.{mlp}", "transformer.h.{layer}"


def _linear(
    megatron: str, hf: str, inputs: str, outputs: str, packings: tuple[Packing, Packing]
) -> tuple[Rule, Rule]:
    weight = Part(f"{_BLOCK}.{hf}.weight", (inputs, outputs))
    bias = Part(f"{_BLOCK}.{hf}.bias", (outputs,))
    return (
        Rule(f"{megatron}.weight", (weight,), packings[0]),
        Rule(f"{megatron}.bias", (bias,), packings[1]),
    )


def _norm(fused: str, alone: str, hf: str) -> tuple[Rule, Rule]:
    weight, bias = (
        Rule(
            f"{fused}.layer_norm_{kind}",
            (Part(f"{_BLOCK}.{hf}.{kind}", ("hidden",)),),
            also=(f"{alone}.{kind}",),
        )
        for kind in ("weight", "bias")
    )
    return weight, bias


_QKV, _PLAIN = (FUSED_PER_GROUP, FUSED_PER_GROUP), (TRANSPOSED, STACKED)

RULES: tuple[Rule, ...] = (
    Rule(
        "embedding.word_embeddings.weight",
        (Part("transformer.wte.weight", ("vocab", "hidden")),),
        PADDED_ROWS,
    ),
    Rule(
        "embedding.position_embeddings.weight",
        (Part("transformer.wpe.weight", ("positions", "hidden")),),
    ),
    *_norm(f"{_A}.self_attention.linear_qkv", f"{_A}.input_layernorm", "ln_1"),
    *_linear(f"{_A}.self_attention.linear_qkv", "attn.c_attn", "hidden", "query_key_value", _QKV),
    *_linear(f"{_A}.self_attention.linear_proj", "attn.c_proj", "hidden", "hidden", _PLAIN),
    *_norm(f"{_M}.mlp.linear_fc1", f"{_M}.pre_mlp_layernorm", "ln_2"),
    *_linear(f"{_M}.mlp.linear_fc1", "mlp.c_fc", "hidden", "ffn", _PLAIN),
    *_linear(f"{_M}.mlp.linear_fc2", "mlp.c_proj", "ffn", "hidden", _PLAIN),
    Rule("decoder.final_norm.weight", (Part("transformer.ln_f.weight", ("hidden",)),)),
    Rule("decoder.final_norm.bias", (Part("transformer.ln_f.bias", ("hidden",)),)),
    Rule(
        "output_layer.weight",
        (Part("lm_head.weight", ("vocab", "hidden")),),
        PADDED_ROWS,
        untied_only=True,
    ),
)

FAMILY = ConvertedFamily(
    rules=RULES,
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "max_positions", default=1024),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "ffn_hidden_size", default=None),
        Field("layer_norm_epsilon", "norm_eps", kind=float, default=1e-5),
        Field("tie_word_embeddings", "tie_embeddings", kind=bool, default=True),
    ),
    fixed={
        # Both are the approximation by tanh.
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    exported={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    harmless=frozenset(
        {
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "n_ctx",  # what n_positions was called besides, long ago
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    ),
    optional_prefix="transformer.",
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
