"""The configuration of a training run, as dataclasses: one per concern.

The unit of a number is in its name (`_steps`, `_samples`, `_tokens`) or in its docstring. A
*sample* is one sequence of `train.sequence_tokens` tokens; a *step* is one update of the weights.
Properties compute what follows from the fields, so that no other file derives it a second time.
What must hold between fields is checked in `validate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from megatron_wd.config.families import FAMILIES, Family

# The embedding table is padded to a multiple of this. It does not depend on the layout, because a
# table that grows with tensor parallelism gives another loss on every layout.
VOCAB_MULTIPLE = 128


@dataclass
class ModelConfig:
    """The shape of the model.

    Attributes:
        family: Architecture: "llama2" (RMSNorm before each sublayer, SwiGLU, rotary, no biases),
            "olmo2" (RMSNorm after each sublayer and on queries and keys, else as Llama-2), or
            "gpt2" (LayerNorm, GELU, learned positions, biases).
        num_layers: Transformer blocks (attention and MLP together count as one).
        hidden_size: Width of the residual stream, in channels.
        ffn_hidden_size: Width inside the MLP, in channels (of the gate and of the up branch each).
        num_attention_heads: Query heads.
        num_query_groups: Key/value heads; null for as many as query heads.
        head_dim: Channels per head; null for hidden_size / num_attention_heads.
        vocab_size: Token ids that the tokenizer uses, before padding.
        max_positions: Longest sequence the model is made for, in tokens: the rows of the table of
            learned positions ("gpt2", which needs it), and what an export says. Null for
            train.sequence_tokens.
        norm_eps: Added to the mean square (RMSNorm) or to the variance (LayerNorm).
        rope_theta: Base of the rotary embedding's frequencies; "gpt2" has none.
        tie_embeddings: Whether the output layer shares the embedding's weight.
        init: Initial weights. "scaled": linear layers and embeddings from N(0, sqrt(2 / (5 d))),
            the output projections of attention and MLP from N(0, 1 / (sqrt(d) num_layers)).
            "normal": N(0, init_std), the output projections divided by sqrt(2 num_layers).
            "truncated_normal": N(0, init_std) without what lies beyond 3 init_std, all alike.
        init_std: Standard deviation for init "normal" and "truncated_normal".
        dropout: Probability of dropping an activation in attention and in the residual branches.
    """

    family: str = "llama2"
    num_layers: int = MISSING
    hidden_size: int = MISSING
    ffn_hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None
    head_dim: int | None = None
    vocab_size: int = MISSING
    max_positions: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    init: Literal["scaled", "normal", "truncated_normal"] = "scaled"
    init_std: float = 0.02
    dropout: float = 0.0

    @property
    def facts(self) -> Family:
        """What a block of this family is made of; `validate` has checked that the family exists."""
        return FAMILIES[self.family]

    @property
    def kv_heads(self) -> int:
        """Key/value heads, with the default filled in."""
        if self.num_query_groups is None:
            return self.num_attention_heads
        return self.num_query_groups

    @property
    def head_size(self) -> int:
        """Channels per head, with the default filled in."""
        if self.head_dim is None:
            return self.hidden_size // self.num_attention_heads
        return self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of VOCAB_MULTIPLE."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass
class CorpusConfig:
    """One tokenized corpus of a blend.

    Attributes:
        path: Prefix of Megatron's PREFIX.bin and PREFIX.idx, without the ending.
        weight: Share of samples drawn from here, relative to the other corpora of the list.
    """

    path: str = MISSING
    weight: float = 1.0


@dataclass
class DataConfig:
    """What is read. Relative paths start from the working directory.

    Attributes:
        tokenizer: A Hugging Face folder, or a SentencePiece `.model` file.
        train: Corpora to train on.
        valid: Corpora to evaluate on; may be empty.
    """

    tokenizer: str = MISSING
    train: list[CorpusConfig] = field(default_factory=list)
    valid: list[CorpusConfig] = field(default_factory=list)


@dataclass
class DecayRuleConfig:
    """One rule of `optim.decay_rules`; the first rule that meets a parameter decides it.

    Attributes:
        match: Pattern that the parameter's whole global name must fit; `*` stands for anything.
        ndim: Dimensions that it must have; null for any number.
        weight_decay: Its coefficient, whatever `optim.weight_decay` is. Set this or `multiplier`.
        multiplier: Of `optim.weight_decay`; null for 1, unless weight_decay is set.
        lr_multiplier: Of the learning rate.
    """

    match: str = MISSING
    ndim: int | None = None
    weight_decay: float | None = None
    multiplier: float | None = None
    lr_multiplier: float = 1.0


@dataclass
class DecayPointConfig:
    """A corner of a piecewise decay schedule.

    Attributes:
        tokens: Tokens trained on before the step; 0 for the first one.
        factor: Of every weight decay, when that many tokens have been trained on.
    """

    tokens: int = MISSING
    factor: float = MISSING


@dataclass
class DecayScheduleConfig:
    """How the weight decay changes during the run: a factor of every coefficient, up or down.

    Attributes:
        shape: "constant" (1), "linear" or "cosine" from `start` at the first step to `end` at the
            last one, or "piecewise": straight lines between `points`, level before the first and
            behind the last.
        start: Factor at the first step.
        end: Factor at the last step.
        points: Corners of "piecewise", in order.
    """

    shape: Literal["constant", "linear", "cosine", "piecewise"] = "constant"
    start: float = 1.0
    end: float = 1.0
    points: list[DecayPointConfig] = field(default_factory=list)


# Named rules for `optim.decay`, as what follows the rules of the config.
DECAY_PRESETS: dict[str, tuple[DecayRuleConfig, ...]] = {
    # The weight-decay study's Llama code (arXiv 2602.11137): one group with everything in it.
    "all": (DecayRuleConfig(match="*"),),
    # OLMo-2: all but the embedding tables (and so the output layer where it is tied).
    "no_embeddings": (
        DecayRuleConfig(match="embedding.*", multiplier=0.0),
        DecayRuleConfig(match="*"),
    ),
    # Megatron: no norms and no biases; embeddings and output layer are matrices.
    "matrices_only": (
        DecayRuleConfig(match="*", ndim=1, multiplier=0.0),
        DecayRuleConfig(match="*"),
    ),
}


@dataclass
class OptimConfig:
    """The optimizer, its rates and its decay.

    Attributes:
        optimizer: "adamw"; "adamh": Adam whose attention and MLP matrices keep their norms
            (Hyperball), with `matrix_lr` for those; "muon": orthogonalised steps of `matrix_lr` for
            them. Both use AdamW for the rest.
        lr: Peak learning rate.
        min_lr: Learning rate at the end of the schedule; null for a tenth of lr.
        matrix_lr: Peak rate of the attention and MLP matrices under "adamh" (there it is the
            effective rate: the length of a step relative to the matrix) and "muon"; it follows the
            same schedule as lr. Null for "adamw".
        weight_decay: Coefficient lambda of decoupled weight decay.
        decay: What decays, when no rule of `decay_rules` says: "all"; "no_embeddings" (all but the
            embedding tables, and so the output layer where it is tied); "matrices_only" (all but
            norms and biases); null where the rules say everything.
        decay_rules: Rules that come before those of `decay`.
        decay_mode: "coupled": a step takes lr(step) * weight_decay of a weight (AdamW);
            "independent": it takes weight_decay of it, whatever the learning rate is.
        decay_schedule: How the weight decay changes during the run.
        beta1: Decay of the running mean of gradients, per step.
        beta2: Decay of the running mean of squared gradients, per step.
        eps: Added to the denominator of the update.
        clip_grad_norm: Largest global L2 norm of the gradient; 0 turns clipping off.
        schedule: "cosine", "linear", "wsd" (warmup, stable, linear decay) or "constant", after the
            warmup.
        warmup_steps: Steps of linear warmup; null for none, unless warmup_fraction is set.
        warmup_fraction: The same as a fraction of all steps; only one of the two may be set.
        wsd_decay_fraction: Last fraction of all steps, in which "wsd" decays to min_lr.
    """

    optimizer: Literal["adamw", "adamh", "muon"] = "adamw"
    lr: float = MISSING
    min_lr: float | None = None
    matrix_lr: float | None = None
    weight_decay: float = 0.1
    decay: str | None = "all"
    decay_rules: list[DecayRuleConfig] = field(default_factory=list)
    decay_mode: Literal["coupled", "independent"] = "coupled"
    decay_schedule: DecayScheduleConfig = field(default_factory=DecayScheduleConfig)
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    wsd_decay_fraction: float = 0.2

    @property
    def final_lr(self) -> float:
        """Learning rate at the end of the schedule, with the default filled in."""
        return 0.1 * self.lr if self.min_lr is None else self.min_lr


@dataclass
class TrainConfig:
    """How long, and in which portions.

    Attributes:
        steps: Steps of the whole run. Exactly one of steps and tokens is set.
        tokens: Tokens of the whole run, rounded up to whole steps.
        global_batch_samples: Samples per step, over all ranks.
        micro_batch_samples: Samples per forward pass on one data-parallel rank.
        sequence_tokens: Tokens per sample.
        z_loss: Weight of the squared logarithm of the softmax's denominator in what is minimised; it
            keeps logits from drifting. Reported apart from the loss.
        recompute: "none" keeps all activations; "full" recomputes each block in the backward pass,
            which costs a third more time and saves most of the activation memory.
    """

    steps: int | None = None
    tokens: int | None = None
    global_batch_samples: int = MISSING
    micro_batch_samples: int = MISSING
    sequence_tokens: int = MISSING
    z_loss: float = 0.0
    recompute: Literal["none", "full"] = "none"

    @property
    def step_tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch_samples * self.sequence_tokens


@dataclass
class ParallelConfig:
    """How the model and the batch are divided over ranks. What is left over is data parallel.

    Attributes:
        tensor: Ranks that share every layer's matrices.
        pipeline: Ranks that share the layers, in order.
        virtual_pipeline: Model chunks per pipeline rank; above 1, the schedule is interleaved.
        context: Ranks that share every sequence.
        sequence: Whether tensor-parallel ranks also share the sequence between the matrices.
        distributed_optimizer: Whether data-parallel ranks share the optimizer's state.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    sequence: bool = False
    distributed_optimizer: bool = True

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: the world size is a multiple of it."""
        return self.tensor * self.pipeline * self.context


@dataclass
class CheckpointConfig:
    """When the run is saved. It is always saved at its end.

    Attributes:
        every_steps: Steps between two checkpoints; null for only at the end.
        keep_last: How many of the newest checkpoints stay on disk; null for all.
        async_save: Whether training goes on while a checkpoint is written.
        accept_config_change: Whether a run folder of a different config may be resumed.
        verify_integrity: Whether a checkpoint's files are hashed when it is saved and checked before it
            is loaded. It reads every file once more, on one rank.
    """

    every_steps: int | None = None
    keep_last: int | None = None
    async_save: bool = False
    accept_config_change: bool = False
    verify_integrity: bool = True


@dataclass
class EvaluateConfig:
    """When the validation loss is measured. It is always measured at the end.

    Attributes:
        every_steps: Steps between two evaluations; null for only at the end.
        samples: Samples of data.valid, the same ones at every evaluation.
        seen_samples: Training samples of the run's first steps that are evaluated beside them, once they
            have been seen, for the train-validation gap; null for as many as `samples`, 0 for none.
    """

    every_steps: int | None = None
    samples: int = 64
    seen_samples: int | None = None

    @property
    def seen(self) -> int:
        """Training samples to evaluate, with the default filled in."""
        return self.samples if self.seen_samples is None else self.seen_samples


@dataclass
class LogConfig:
    """What is written about the run.

    Attributes:
        every_steps: Steps between two rows of metrics.jsonl.
        matrices_every_steps: Steps between two measurements of every matrix (norms, effective learning
            rate, equilibrium); null for never.
        tensorboard: Whether the same numbers are written for TensorBoard.
        peak_tflops: Peak of one device in TFLOP/s, for `mfu`; null for the known value of the GPU,
            or a measured one on the CPU.
    """

    every_steps: int = 10
    matrices_every_steps: int | None = 10
    tensorboard: bool = True
    peak_tflops: float | None = None


@dataclass
class Config:
    """A training run.

    Attributes:
        run_dir: Folder of the run; relative paths start from the working directory.
        seed: Seed of initial weights, data order and dropout.
        precision: Arithmetic of the matrix products; master weights are fp32 in each.
        init_from: Weights to start from instead of random ones: a Hugging Face folder, a run folder
            or a checkpoint. The optimizer starts anew. Null for random weights.
        model: Shape of the model.
        data: Tokenizer and corpora.
        optim: Optimizer and schedule.
        train: Length and batch.
        parallel: Layout over ranks.
        checkpoint: Saving.
        evaluate: Validation loss.
        log: Metrics.
    """

    run_dir: str = MISSING
    seed: int = 1234
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    init_from: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def steps(self) -> int:
        """Steps of the whole run, from train.steps or from train.tokens rounded up."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None, "validate() lets exactly one of the two be set"
        return -(-self.train.tokens // self.train.step_tokens)

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run trains on: whole steps only."""
        return self.steps * self.train.step_tokens

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warmup, from optim.warmup_steps or optim.warmup_fraction rounded up."""
        if self.optim.warmup_steps is not None:
            return self.optim.warmup_steps
        return _fraction_of_steps(self.optim.warmup_fraction or 0.0, self.steps)

    @property
    def wsd_decay_steps(self) -> int:
        """Steps in which the schedule "wsd" decays, at the end; 0 for the other schedules."""
        if self.optim.schedule != "wsd":
            return 0
        return _fraction_of_steps(self.optim.wsd_decay_fraction, self.steps)


def _fraction_of_steps(fraction: float, steps: int) -> int:
    """Rounds `fraction * steps` up, but not for the last digits of a float (0.1 * 30 > 3)."""
    return -int(-round(fraction * steps, 6) // 1)


def num_parameters(model: ModelConfig, *, include_embeddings: bool = True) -> int:
    """Counts the parameters of a model, without the padding of the vocabulary.

    Args:
        model: Shape of the model.
        include_embeddings: Whether the embedding tables and the output layer count.

    Returns:
        Number of scalars that are trained.
    """
    facts, width, head = model.facts, model.hidden_size, model.head_size
    query, key_value = model.num_attention_heads * head, model.kv_heads * head
    norm = width * (2 if facts.norm == "layer" else 1)
    block = width * (query + 2 * key_value) + query * width
    block += (3 if facts.gated_mlp else 2) * width * model.ffn_hidden_size
    block += 2 * norm
    if facts.qk_norm:
        block += query + key_value
    if facts.biases:
        block += query + 2 * key_value + width + model.ffn_hidden_size + width
    total = model.num_layers * block + norm
    if include_embeddings:
        total += (1 if model.tie_embeddings else 2) * model.vocab_size * width
        if facts.positions == "learned":
            assert model.max_positions is not None, "validate() asks for it"
            total += model.max_positions * width
    return total
