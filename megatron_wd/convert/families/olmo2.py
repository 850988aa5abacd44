"""OLMo-2: `Olmo2ForCausalLM`. Norms of queries and keys over all heads, and after each sublayer."""

from megatron_wd.convert.families import llama2
from megatron_wd.convert.families.base import ConvertedFamily
from megatron_wd.convert.packing import Part, Rule

A, M, BLOCK = llama2.A, llama2.M, llama2.BLOCK

RULES: tuple[Rule, ...] = (
    llama2.EMBEDDING,
    llama2.QKV,
    # Channels in the order of the heads on both sides: nothing to permute.
    Rule(
        f"{A}.self_attention.q_norm.weight",
        (Part(f"{BLOCK}.self_attn.q_norm.weight", ("query",)),),
    ),
    Rule(
        f"{A}.self_attention.k_norm.weight",
        (Part(f"{BLOCK}.self_attn.k_norm.weight", ("key_value",)),),
    ),
    llama2.ATTENTION_OUT,
    Rule(
        f"{A}.self_attention.linear_proj.post_layernorm.weight",
        (Part(f"{BLOCK}.post_attention_layernorm.weight", ("hidden",)),),
    ),
    llama2.GATE_UP,
    llama2.DOWN,
    Rule(
        f"{M}.mlp.linear_fc2.post_layernorm.weight",
        (Part(f"{BLOCK}.post_feedforward_layernorm.weight", ("hidden",)),),
    ),
    llama2.FINAL_NORM,
    llama2.OUTPUT,
)

FAMILY = ConvertedFamily(
    rules=RULES,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields=llama2.fields(default_eps=1e-5),
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "clip_qkv": (None,),
        "partial_rotary_factor": (1.0, None),
        "sliding_window": (None,),
        "use_sliding_window": (False, None),
    },
    exported={"hidden_act": "silu", "attention_bias": False},
    buffers=llama2.FAMILY.buffers,
)
