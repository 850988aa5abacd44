"""From a configuration to Megatron Core model chunks on this rank."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_wd.backend import cpu
from megatron_wd.config import Config, UserError
from megatron_wd.models.blocks import BLOCK_PATTERN, stack_spec, transformer_options
from megatron_wd.models.init import initialize_weights
from megatron_wd.models.layers import CausalLM


def have_transformer_engine() -> bool:
    """Whether Transformer Engine can be used: it is installed and there is a GPU for its kernels."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


def check_runtime(config: Config) -> None:
    """Stops before anything is built where this machine cannot do what the configuration asks.

    Raises:
        UserError: fp8 or context parallelism without Transformer Engine.
    """
    if have_transformer_engine():
        return
    where = "on the CPU" if not torch.cuda.is_available() else "without Transformer Engine"
    if config.precision == "fp8":
        raise UserError(
            f"precision=fp8 cannot run {where}: it needs a GPU (Ada, Hopper or newer) and Transformer "
            "Engine. Use precision=bf16, or install the `gpu` extra on a machine with such a GPU."
        )
    if config.parallel.context > 1:
        raise UserError(
            f"parallel.context={config.parallel.context} cannot run {where}: attention over a divided "
            "sequence needs Transformer Engine. Set parallel.context=1."
        )


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron Core's configuration of the layers. Every default that matters is set here."""
    model, parallel = config.model, config.parallel
    use_te = have_transformer_engine()
    half = config.precision in ("bf16", "fp8")
    interleaved = parallel.virtual_pipeline > 1
    return TransformerConfig(
        num_layers=model.num_layers * len(BLOCK_PATTERN),
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        layernorm_epsilon=model.norm_eps,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        **transformer_options(model.facts),
        # Weights come from models/init.py, the same on every layout.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=torch.bfloat16 if half else torch.float32,
        bf16=half,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        fp8="hybrid" if config.precision == "fp8" else None,
        fp8_recipe="tensorwise",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        # Several messages between two ranks in one batch corrupt interleaved pipelines silently.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        recompute_granularity="full" if config.train.recompute == "full" else None,
        recompute_method="uniform" if config.train.recompute == "full" else None,
        recompute_num_layers=1 if config.train.recompute == "full" else None,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=use_te and model.facts.gated_mlp,
        bias_dropout_fusion=use_te,
        apply_rope_fusion=use_te,
        masked_softmax_fusion=False,
        persist_layer_norm=use_te,
        attention_softmax_in_fp32=False,
    )


def layer_pattern(config: Config) -> str:
    """HybridModel's layer pattern, with `|` between pipeline segments."""
    segments = config.parallel.pipeline * config.parallel.virtual_pipeline
    return "|".join([BLOCK_PATTERN * (config.model.num_layers // segments)] * segments)


def build_model(config: Config) -> list[nn.Module]:
    """Builds and initialises this rank's model chunks; more than one where pipelines interleave.

    Weights are those of (seed, name), whatever the layout. fp32 weights on the device where precision is
    fp32, bf16 weights otherwise (the optimizer keeps fp32 masters).

    Args:
        config: a validated configuration; process groups must exist.

    Returns:
        The chunks, in pipeline order.

    Raises:
        UserError: this machine cannot do what is asked (`check_runtime`).
    """
    check_runtime(config)
    megatron_config, facts = transformer_config(config), config.model.facts
    chunks = max(1, config.parallel.virtual_pipeline)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    model: list[nn.Module] = []
    with cpu.cuda_requests_on_cpu():
        for index in range(chunks):
            chunk = CausalLM(
                config=megatron_config,
                hybrid_stack_spec=stack_spec(
                    facts, use_transformer_engine=have_transformer_engine()
                ),
                vocab_size=config.model.padded_vocab_size,
                unpadded_vocab_size=config.model.vocab_size,
                z_loss=config.train.z_loss,
                max_sequence_length=config.model.max_positions or config.train.sequence_tokens,
                hybrid_layer_pattern=layer_pattern(config),
                pre_process=first and index == 0,
                post_process=last and index == chunks - 1,
                share_embeddings_and_output_weights=config.model.tie_embeddings,
                position_embedding_type=(
                    "rope" if facts.positions == "rotary" else "learned_absolute"
                ),
                rotary_base=config.model.rope_theta,  # type: ignore[arg-type]
                vp_stage=index if chunks > 1 else None,
            )
            if torch.cuda.is_available():
                chunk = chunk.cuda(torch.cuda.current_device())
            model.append(chunk)
    initialize_weights(model, config)
    if megatron_config.bf16:
        model = [Float16Module(megatron_config, chunk) for chunk in model]
    return model


def distribute_model(model: list[nn.Module], config: Config) -> list[nn.Module]:
    """Wraps the chunks for data parallelism; gradients accumulate in fp32."""
    on_gpu = torch.cuda.is_available()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_grad_reduce=on_gpu,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,
        bucket_size=None if not on_gpu else 40_000_000,
    )
    with cpu.cuda_requests_on_cpu():
        return [
            DistributedDataParallel(
                config=chunk.config,  # type: ignore[arg-type]
                ddp_config=ddp_config,
                module=chunk,
                disable_bucketing=index > 0,
            )
            for index, chunk in enumerate(model)
        ]
