"""What the converter knows of a model family: its name table, and its config in Hugging Face terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_wd.convert.packing import Rule

_REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """A field of config.json that sets a field of `ModelConfig`.

    Attributes:
        hf: Its name in config.json.
        ours: Its name in `ModelConfig`.
        exported: Attribute of `ModelConfig` that an export writes, where that is another one: the
            property with the default filled in.
        kind: Type of the value.
        default: What transformers takes where the field is missing; None leaves ours at null.
    """

    hf: str
    ours: str
    exported: str = ""
    kind: type = int
    default: Any = _REQUIRED

    @property
    def required(self) -> bool:
        """Whether config.json must have it."""
        return self.default is _REQUIRED


@dataclass(frozen=True)
class ConvertedFamily:
    """A family, as data.

    Attributes:
        rules: The name table.
        architecture: Class in transformers.
        model_type: `model_type` in config.json.
        fields: Fields that set the shape of the model.
        fixed: Fields that change the computation, and the values that ours has; the first one is
            what transformers takes where the field is missing. Any other value is refused.
        exported: Fields that an export writes besides.
        harmless: Fields that change nothing of the computation, besides those of `HARMLESS`.
        optional_prefix: Start of the tensors' names that some folders leave out.
        buffers: Regular expression for tensors that some folders hold and that are no weights.
    """

    rules: tuple[Rule, ...]
    architecture: str
    model_type: str
    fields: tuple[Field, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    exported: Mapping[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    optional_prefix: str = ""
    buffers: str = r"(?!)"


# Whose model it is, how text is generated from it, how it was saved, how it was initialised: nothing
# that changes a logit.
HARMLESS = frozenset(
    [
        "_name_or_path",
        "_model_name_or_path",
        "transformers.js_config",
        "unk_token_id",
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "attention_dropout",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "torchscript",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "is_decoder",
        "is_encoder_decoder",
        "tokenizer_class",
        "prefix",
        "chunk_size_feed_forward",
        "do_sample",
        "early_stopping",
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "tf_legacy_loss",
        "use_bfloat16",
        "is_llama_config",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_flash_attn_2_enabled",
    ]
)

# In every family: what they would change is refused by name.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "auto_map": (None,),
}
