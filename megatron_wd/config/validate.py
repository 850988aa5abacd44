"""What must hold between the fields of a config. Fields that disagree are named, never repaired.

Every check yields its message, so that a user sees all mistakes at once. What depends on the
machine (is there a GPU, Transformer Engine) or on the data is checked where those are at hand.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from megatron_wd.config.errors import UserError
from megatron_wd.config.families import FAMILIES
from megatron_wd.config.schema import (
    DECAY_PRESETS,
    Config,
    CorpusConfig,
    ModelConfig,
)

FP8_MULTIPLE = 16  # Transformer Engine's fp8 matrix products need it of every dimension


def validate(config: Config) -> None:
    """Checks everything that needs neither torch nor the number of processes.

    Raises:
        UserError: One line for each mistake: the fields, their values, the remedy.
    """
    _raise_all(
        [
            *_ranges(config),
            *_model(config.model),
            *_data(config),
            # The others divide by these numbers: only once they are known to be sensible.
        ]
    )
    _raise_all(
        [
            *_layout(config),
            *_length(config),
            *_schedule(config),
            *_decay(config),
            *_optimizer(config),
            *_fp8(config),
        ]
    )


def validate_world(config: Config, world_size: int) -> None:
    """Checks that the layout and the batch fit a number of processes.

    Args:
        config: A config that passed `validate`.
        world_size: Processes over all nodes.

    Raises:
        UserError: Naming the fields, the number of processes and the remedy.
    """
    parallel, train = config.parallel, config.train
    if world_size % parallel.model_ranks:
        raise UserError(
            f"{world_size} processes cannot hold the layout: parallel.tensor {parallel.tensor} x "
            f"parallel.pipeline {parallel.pipeline} x parallel.context {parallel.context} needs a "
            f"multiple of {parallel.model_ranks}; start that many or change the layout"
        )
    copies = world_size // parallel.model_ranks
    portion = train.micro_batch_samples * copies
    if train.global_batch_samples % portion:
        raise UserError(
            f"train.global_batch_samples {train.global_batch_samples} is not a multiple of "
            f"train.micro_batch_samples {train.micro_batch_samples} x {copies} data-parallel ranks "
            f"({world_size} processes / {parallel.model_ranks} per model); change one of the three"
        )
    micro_batches = train.global_batch_samples // portion
    # A multiple of at least 1 is also at least as many as there are pipeline ranks.
    if parallel.virtual_pipeline > 1 and micro_batches % parallel.pipeline:
        raise UserError(
            f"parallel.virtual_pipeline {parallel.virtual_pipeline} needs the micro-batches of a "
            f"step to be a multiple of parallel.pipeline {parallel.pipeline}, but there are "
            f"{micro_batches} (train.global_batch_samples {train.global_batch_samples} / "
            f"train.micro_batch_samples {train.micro_batch_samples} / {copies} data-parallel "
            "ranks); change the batch or set parallel.virtual_pipeline=1"
        )


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


def _ranges(config: Config) -> Iterator[str]:
    """Each number by itself."""
    model, optim, train = config.model, config.optim, config.train
    parallel, log = config.parallel, config.log
    at_least_one = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "model.head_dim": model.head_dim,
        "model.vocab_size": model.vocab_size,
        "model.max_positions": model.max_positions,
        "train.steps": train.steps,
        "train.tokens": train.tokens,
        "train.global_batch_samples": train.global_batch_samples,
        "train.micro_batch_samples": train.micro_batch_samples,
        "train.sequence_tokens": train.sequence_tokens,
        "parallel.tensor": parallel.tensor,
        "parallel.pipeline": parallel.pipeline,
        "parallel.virtual_pipeline": parallel.virtual_pipeline,
        "parallel.context": parallel.context,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "evaluate.every_steps": config.evaluate.every_steps,
        "evaluate.samples": config.evaluate.samples,
        "log.every_steps": log.every_steps,
        "log.matrices_every_steps": log.matrices_every_steps,
    }
    above_zero = {
        "model.norm_eps": model.norm_eps,
        "model.rope_theta": model.rope_theta,
        "model.init_std": model.init_std,
        "optim.lr": optim.lr,
        "optim.matrix_lr": optim.matrix_lr,
        "optim.eps": optim.eps,
        "log.peak_tflops": log.peak_tflops,
    }
    not_negative = {
        "seed": config.seed,
        "optim.min_lr": optim.min_lr,
        "optim.weight_decay": optim.weight_decay,
        "optim.clip_grad_norm": optim.clip_grad_norm,
        "optim.warmup_steps": optim.warmup_steps,
        "optim.decay_schedule.start": optim.decay_schedule.start,
        "optim.decay_schedule.end": optim.decay_schedule.end,
        "evaluate.seen_samples": config.evaluate.seen,
        "train.z_loss": train.z_loss,
    }
    below_one = {
        "model.dropout": model.dropout,
        "optim.beta1": optim.beta1,
        "optim.beta2": optim.beta2,
    }
    fractions = {
        "optim.warmup_fraction": optim.warmup_fraction,
        "optim.wsd_decay_fraction": optim.wsd_decay_fraction,
    }
    for numbers, fits, wanted in (
        (at_least_one, lambda x: x >= 1, "at least 1"),
        (above_zero, lambda x: x > 0, "above 0"),
        (not_negative, lambda x: x >= 0, "at least 0"),
        (below_one, lambda x: 0 <= x < 1, "at least 0 and below 1"),
        (fractions, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ):
        for name, value in numbers.items():
            if value is not None and not fits(value):
                yield f"{name} is {value}; it must be {wanted}"


def _model(model: ModelConfig) -> Iterator[str]:
    if model.family not in FAMILIES:
        near = difflib.get_close_matches(model.family, FAMILIES, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        yield f"model.family is {model.family}{meant}; known are {', '.join(FAMILIES)}"
        return
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads < 1 or model.head_dim == 0 or groups == 0:
        return  # said by _ranges
    if groups is not None and heads % groups:
        yield (
            f"model.num_attention_heads {heads} is not a multiple of model.num_query_groups "
            f"{groups}; every key/value head serves the same number of query heads"
        )
    if model.head_dim is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size {model.hidden_size} is not a multiple of model.num_attention_heads "
            f"{heads}; change one of the two or set model.head_dim"
        )
    elif model.facts.positions == "rotary" and model.head_size % 2:
        source = "model.hidden_size / model.num_attention_heads"
        yield (
            f"{source if model.head_dim is None else 'model.head_dim'} is {model.head_size}; "
            "rotary embeddings turn pairs of channels, so heads must have an even number of them"
        )
    if not model.facts.grouped_queries and heads not in (groups or heads,):
        yield (
            f"model.num_query_groups is {groups}, but {model.family} has as many key/value heads as "
            f"heads ({heads}); set model.num_query_groups=null"
        )
    if not model.facts.grouped_queries and heads * model.head_size != model.hidden_size:
        yield (
            f"model.head_dim is {model.head_dim}, but the heads of {model.family} divide the hidden "
            f"size among them; set model.head_dim=null"
        )
    if model.facts.positions == "learned" and model.max_positions is None:
        yield (
            f"model.max_positions is not set, but {model.family} has a table of learned positions; "
            "set it to the longest sequence that the model shall be able to read"
        )


def _data(config: Config) -> Iterator[str]:
    if not config.run_dir.strip():
        yield "run_dir is empty; name the folder that the run is written to"
    if not config.data.tokenizer.strip():
        yield "data.tokenizer is empty; name a Hugging Face folder or a SentencePiece .model file"
    if not config.data.train:
        yield "data.train is empty; list at least one corpus, such as [{path: data/corpus}]"
    if config.evaluate.every_steps is not None and not config.data.valid:
        yield (
            f"evaluate.every_steps is {config.evaluate.every_steps}, but data.valid is empty; list "
            "a corpus there, or set evaluate.every_steps=null"
        )
    yield from _corpora("data.train", config.data.train)
    yield from _corpora("data.valid", config.data.valid)


def _corpora(name: str, corpora: list[CorpusConfig]) -> Iterator[str]:
    for index, corpus in enumerate(corpora):
        if corpus.weight <= 0:
            yield f"{name}.{index}.weight is {corpus.weight}; it must be above 0"
        if corpus.path.endswith((".bin", ".idx")):
            yield (
                f"{name}.{index}.path is {corpus.path}; name the prefix without its ending: "
                f"{corpus.path[:-4]}"
            )
        if not corpus.path.strip():
            yield f"{name}.{index}.path is empty; name the prefix of a .bin/.idx pair"


def _layout(config: Config) -> Iterator[str]:
    model, parallel, train = config.model, config.parallel, config.train
    divided = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups (key/value heads)": model.kv_heads,
        f"the padded vocabulary (model.vocab_size {model.vocab_size})": model.padded_vocab_size,
    }
    for name, value in divided.items():
        if value % parallel.tensor:
            yield f"{name} {value} is not divisible by parallel.tensor {parallel.tensor}"
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if model.num_layers % chunks:
        chunk_name = f"parallel.pipeline {parallel.pipeline}"
        if parallel.virtual_pipeline > 1:
            chunk_name += f" x parallel.virtual_pipeline {parallel.virtual_pipeline}"
        yield f"model.num_layers {model.num_layers} is not divisible by {chunk_name}"
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline is {parallel.virtual_pipeline}, but parallel.pipeline is "
            "1: there is nothing to interleave; raise parallel.pipeline or set "
            "parallel.virtual_pipeline=1"
        )
    if parallel.context > 1 and train.sequence_tokens % (2 * parallel.context):
        yield (
            f"train.sequence_tokens {train.sequence_tokens} is not divisible by twice "
            f"parallel.context {parallel.context}; each rank holds two pieces of a sequence"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield (
            "parallel.sequence is true, but parallel.tensor is 1: tensor-parallel ranks share the "
            "sequence; raise parallel.tensor or set parallel.sequence=false"
        )
    elif parallel.sequence and train.sequence_tokens % (parallel.tensor * parallel.context):
        yield (
            f"train.sequence_tokens {train.sequence_tokens} is not divisible by parallel.tensor "
            f"{parallel.tensor} x parallel.context {parallel.context} (parallel.sequence)"
        )
    if train.global_batch_samples % train.micro_batch_samples:
        yield (
            f"train.global_batch_samples {train.global_batch_samples} is not a multiple of "
            f"train.micro_batch_samples {train.micro_batch_samples}; change one of the two"
        )


def _length(config: Config) -> Iterator[str]:
    train, positions = config.train, config.model.max_positions
    if positions is not None and train.sequence_tokens > positions:
        yield (
            f"train.sequence_tokens {train.sequence_tokens} is more than model.max_positions "
            f"{positions}; train on shorter sequences or raise it"
        )
    if train.steps is None and train.tokens is None:
        yield "neither train.steps nor train.tokens is set; set the one you mean"
    if train.steps is not None and train.tokens is not None:
        yield (
            f"train.steps {train.steps} and train.tokens {train.tokens} are both set; "
            "set the other one to null"
        )


def _schedule(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        yield f"optim.min_lr {optim.min_lr} is above optim.lr {optim.lr}; lower it"
    if optim.warmup_steps is not None and optim.warmup_fraction is not None:
        yield (
            f"optim.warmup_steps {optim.warmup_steps} and optim.warmup_fraction "
            f"{optim.warmup_fraction} are both set; set the other one to null"
        )
        return
    if (train.steps is None) == (train.tokens is None):
        return  # said by _length
    used = config.warmup_steps + config.wsd_decay_steps
    if used <= config.steps:
        return
    if optim.warmup_steps is None:
        warmup = f"optim.warmup_fraction {optim.warmup_fraction}"
    else:
        warmup = f"optim.warmup_steps {optim.warmup_steps}"
    if config.wsd_decay_steps:
        decay = f"optim.wsd_decay_fraction {optim.wsd_decay_fraction}"
        yield (
            f"{warmup} and {decay} take {used} steps together, but the run has {config.steps}; "
            "shorten one of the two or train longer"
        )
    else:
        yield f"{warmup} is longer than the run of {config.steps} steps; shorten it or train longer"


def _decay(config: Config) -> Iterator[str]:
    optim, schedule = config.optim, config.optim.decay_schedule
    if optim.decay is not None and optim.decay not in DECAY_PRESETS:
        near = difflib.get_close_matches(optim.decay, DECAY_PRESETS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        yield (
            f"optim.decay is {optim.decay}{meant}; known are {', '.join(DECAY_PRESETS)}, and null where "
            "optim.decay_rules says everything"
        )
    if optim.decay is None and not optim.decay_rules:
        yield "optim.decay is null and optim.decay_rules is empty; name a preset or list rules"
    for index, rule in enumerate(optim.decay_rules):
        place = f"optim.decay_rules.{index} ({rule.match!r})"
        if rule.weight_decay is not None and rule.multiplier is not None:
            yield f"{place} sets weight_decay and multiplier; keep one of the two"
        for name in ("weight_decay", "multiplier", "lr_multiplier"):
            value = getattr(rule, name)
            if value is not None and value < 0:
                yield f"{place}: {name} is {value}; it must be at least 0"
        if rule.ndim is not None and rule.ndim < 1:
            yield f"{place}: ndim is {rule.ndim}; it must be at least 1"
    points = schedule.points
    if (schedule.shape == "piecewise") != bool(points):
        yield (
            f"optim.decay_schedule.shape is {schedule.shape}, but there are {len(points)} points; "
            "piecewise needs points, the other shapes have none"
        )
    if schedule.shape in ("constant", "piecewise") and (schedule.start, schedule.end) != (1.0, 1.0):
        yield (
            f"optim.decay_schedule.start and end are {schedule.start} and {schedule.end}, but shape "
            f"{schedule.shape} has neither; choose linear or cosine, or leave them out"
        )
    tokens = [point.tokens for point in points]
    if tokens != sorted(set(tokens)) or any(t < 0 for t in tokens):
        yield f"optim.decay_schedule.points are at tokens {tokens}; they must rise from at least 0"
    if any(point.factor < 0 for point in points):
        yield "optim.decay_schedule.points has a factor below 0; decay cannot be negative"


def _optimizer(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.optimizer == "muon" and config.parallel.distributed_optimizer:
        yield (
            "optim.optimizer muon works on whole matrices, which parallel.distributed_optimizer=true cuts "
            "into pieces; set parallel.distributed_optimizer=false"
        )
    if optim.optimizer == "adamw" and optim.matrix_lr is not None:
        yield (
            f"optim.matrix_lr is {optim.matrix_lr}, but optim.optimizer is adamw, which has one rate; "
            "set optim.matrix_lr=null, or choose adamh or muon"
        )
    if optim.optimizer != "adamw" and optim.matrix_lr is None:
        yield (
            f"optim.optimizer is {optim.optimizer}, but optim.matrix_lr is not set: the rate of the "
            "attention and MLP matrices (for adamh about sqrt(lr * weight_decay) of a good AdamW run)"
        )


def _fp8(config: Config) -> Iterator[str]:
    if config.precision != "fp8":
        return
    model, parallel, train = config.model, config.parallel, config.train
    share = f" / parallel.tensor {parallel.tensor}" if parallel.tensor > 1 else ""
    heads = model.num_attention_heads // parallel.tensor
    groups = model.kv_heads // parallel.tensor
    tokens_ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    dimensions = {
        "model.hidden_size": model.hidden_size,
        f"model.ffn_hidden_size{share}": model.ffn_hidden_size // parallel.tensor,
        f"query, key and value channels{share}": (heads + 2 * groups) * model.head_size,
        f"attention's output channels{share}": heads * model.head_size,
        "train.micro_batch_samples x train.sequence_tokens on one rank": (
            train.micro_batch_samples * train.sequence_tokens // tokens_ranks
        ),
    }
    for name, value in dimensions.items():
        if value % FP8_MULTIPLE:
            yield (
                f"precision fp8 needs every dimension to be a multiple of {FP8_MULTIPLE}, but "
                f"{name} is {value}; change it or use precision=bf16"
            )
