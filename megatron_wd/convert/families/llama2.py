"""Llama-2 and what has its shape: `LlamaForCausalLM`."""

from megatron_wd.convert.families.base import ConvertedFamily, Field
from megatron_wd.convert.packing import PADDED_ROWS, PER_GROUP, Part, Rule

A, M, BLOCK = "decoder.layers.{attention}", "decoder.layers.{mlp}", "model.layers.{layer}"

EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
    PADDED_ROWS,
)
QKV = Rule(
    f"{A}.self_attention.linear_qkv.weight",
    (
        Part(f"{BLOCK}.self_attn.q_proj.weight", ("query", "hidden")),
        Part(f"{BLOCK}.self_attn.k_proj.weight", ("key_value", "hidden")),
        Part(f"{BLOCK}.self_attn.v_proj.weight", ("key_value", "hidden")),
    ),
    PER_GROUP,
)
ATTENTION_OUT = Rule(
    f"{A}.self_attention.linear_proj.weight",
    (Part(f"{BLOCK}.self_attn.o_proj.weight", ("hidden", "query")),),
)
GATE_UP = Rule(
    f"{M}.mlp.linear_fc1.weight",
    (
        Part(f"{BLOCK}.mlp.gate_proj.weight", ("ffn", "hidden")),
        Part(f"{BLOCK}.mlp.up_proj.weight", ("ffn", "hidden")),
    ),
)
DOWN = Rule(
    f"{M}.mlp.linear_fc2.weight", (Part(f"{BLOCK}.mlp.down_proj.weight", ("hidden", "ffn")),)
)
FINAL_NORM = Rule("decoder.final_norm.weight", (Part("model.norm.weight", ("hidden",)),))
OUTPUT = Rule(
    "output_layer.weight",
    (Part("lm_head.weight", ("vocab", "hidden")),),
    PADDED_ROWS,
    untied_only=True,
)

RULES: tuple[Rule, ...] = (
    EMBEDDING,
    Rule(
        f"{A}.self_attention.linear_qkv.layer_norm_weight",
        (Part(f"{BLOCK}.input_layernorm.weight", ("hidden",)),),
        also=(f"{A}.input_layernorm.weight",),
    ),
    QKV,
    ATTENTION_OUT,
    Rule(
        f"{M}.mlp.linear_fc1.layer_norm_weight",
        (Part(f"{BLOCK}.post_attention_layernorm.weight", ("hidden",)),),
        also=(f"{M}.pre_mlp_layernorm.weight",),
    ),
    GATE_UP,
    DOWN,
    FINAL_NORM,
    OUTPUT,
)


def fields(default_eps: float) -> tuple[Field, ...]:
    """The fields of config.json that Llama and its relatives share."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "hidden_size"),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("num_key_value_heads", "num_query_groups", exported="kv_heads", default=None),
        Field("head_dim", "head_dim", exported="head_size", default=None),
        Field("max_position_embeddings", "max_positions", default=2048),
        Field("rms_norm_eps", "norm_eps", kind=float, default=default_eps),
        Field("tie_word_embeddings", "tie_embeddings", kind=bool, default=False),
    )


FAMILY = ConvertedFamily(
    rules=RULES,
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=fields(default_eps=1e-6),
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1.0, None),
        "rope_interleaved": (False,),
        "sliding_window": (None,),
        "use_sliding_window": (False, None),
    },
    exported={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
