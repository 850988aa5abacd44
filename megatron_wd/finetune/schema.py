"""The configuration of a fine-tuning run, as dataclasses: one per concern. Imports no torch.

A *sample* is one example (prompt and response); a *step* is one update of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from megatron_wd.config import UserError, load_structured

CONTENT = "{content}"


@dataclass
class TaskConfig:
    """What is learned: rows of data, and how a row becomes a prompt and a response.

    `prompt` and `response` are Jinja templates over the fields of a row, as in chat templates and in
    lm-evaluation-harness: `{{ question }}`, `{{ endings[label | int] }}`. A null renders as nothing.

    Attributes:
        name: Short name, written into reports.
        source: JSON Lines and Parquet files, folders or globs; or one `hf:NAME`, `hf:NAME:SPLIT` or
            `hf:NAME:CONFIG:SPLIT`.
        prompt: Template of what the model is given; `template` is put around it.
        response: Template of what it is to answer.
        keep_if: Jinja expression; a row for which it is false is left out. Null keeps all.
        origin: Where the data come from, for readers.
        licence: Of the data, for readers.
        expect_rows: Rows that the source is known to have; another number is reported, not refused.
        expect_samples: The same for the examples that `keep_if` leaves.
        max_samples: Use only so many examples, the first ones; null for all.
    """

    name: str = MISSING
    source: list[str] = MISSING
    prompt: str = "{{ prompt }}"
    response: str = "{{ response }}"
    keep_if: str | None = None
    origin: str | None = None
    licence: str | None = None
    expect_rows: int | None = None
    expect_samples: int | None = None
    max_samples: int | None = None


@dataclass
class SftOptimConfig:
    """AdamW and its schedule. The defaults are those of the transformers Trainer.

    Attributes:
        lr: Peak learning rate.
        weight_decay: Coefficient of decoupled weight decay. It applies to all but biases and norms,
            embeddings included, as the transformers Trainer has it.
        beta1: Decay of the running mean of gradients, per step.
        beta2: Decay of the running mean of squared gradients, per step.
        eps: Added to the denominator of the update.
        clip_grad_norm: Largest global L2 norm of the gradient; 0 turns clipping off.
        schedule: After the warmup: "cosine" or "linear" to zero, or "constant".
        warmup_fraction: Linear warmup, as a fraction of all steps.
    """

    lr: float = MISSING
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = 0.1


@dataclass
class SftTrainConfig:
    """How long, and in which portions.

    Attributes:
        epochs: Passes over the data.
        max_steps: Stop (and end the schedule) after so many steps; null goes by epochs.
        batch_samples: Samples in one step, over all processes.
        micro_batch_samples: Samples that one process computes at once. Where batch_samples is no
            multiple of it times the processes, it is an error.
        precision: "bf16" computes in bfloat16 with weights and optimizer in fp32; "fp32".
        recompute: Whether activations are computed again in the backward pass, to save memory.
        fsdp: Whether several processes share weights and optimizer (PyTorch FSDP) instead of
            holding a copy each.
    """

    epochs: float = 3.0
    max_steps: int | None = None
    batch_samples: int = 64
    micro_batch_samples: int = 8
    precision: Literal["bf16", "fp32"] = "bf16"
    recompute: bool = False
    fsdp: bool = False


@dataclass
class FinetuneConfig:
    """A fine-tuning run.

    Attributes:
        run_dir: Folder of the run; the model appears in its `hf` folder when it is done.
        model: Hugging Face folder, or a name on the hub where there is a network.
        task: The data.
        template: Text around a prompt; the response follows it directly.
        cutoff_tokens: Longest example, with the end-of-text token.
        over_long: What happens to longer ones: "refuse" the run, "drop" them, or "cut" them (their
            end, and with it the end-of-text token, is not learned).
        empty: What happens to examples with an empty prompt or response: "refuse" or "drop".
        seed: Of the order of the examples, and of dropout where the model has it.
        save_dtype: Of the exported weights: "base" for that of the base model.
        checkpoint_every_steps: Steps between checkpoints; one is also saved when the run is stopped.
        log_every_steps: Steps between rows of metrics.jsonl.
    """

    run_dir: str = MISSING
    model: str = MISSING
    task: TaskConfig = field(default_factory=TaskConfig)
    template: str = "Human: {content}\nAssistant:"
    cutoff_tokens: int = 2048
    over_long: Literal["refuse", "drop", "cut"] = "refuse"
    empty: Literal["refuse", "drop"] = "refuse"
    optim: SftOptimConfig = field(default_factory=SftOptimConfig)
    train: SftTrainConfig = field(default_factory=SftTrainConfig)
    seed: int = 42
    save_dtype: Literal["base", "float32", "bfloat16"] = "base"
    checkpoint_every_steps: int = 500
    log_every_steps: int = 10


def load_finetune_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> FinetuneConfig:
    """Reads and checks the config of a fine-tuning run.

    Raises:
        UserError: Naming file, key and remedy.
    """
    config = load_structured(FinetuneConfig, path, overrides)
    problems = [f"{os.fspath(path)}: {problem}" for problem in _problems(config)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _problems(config: FinetuneConfig) -> list[str]:
    """What is wrong with the values, one message each."""
    optim, train, task = config.optim, config.train, config.task
    checks = [
        (optim.lr > 0, f"optim.lr is {optim.lr:g}; it must be above 0"),
        (optim.weight_decay >= 0, f"optim.weight_decay is {optim.weight_decay:g}; give 0 or more"),
        (0 <= optim.beta1 < 1, f"optim.beta1 is {optim.beta1:g}; it must be in [0, 1)"),
        (0 <= optim.beta2 < 1, f"optim.beta2 is {optim.beta2:g}; it must be in [0, 1)"),
        (optim.eps > 0, f"optim.eps is {optim.eps:g}; it must be above 0"),
        (
            optim.clip_grad_norm >= 0,
            f"optim.clip_grad_norm is {optim.clip_grad_norm:g}; give 0 or more",
        ),
        (
            0 <= optim.warmup_fraction < 1,
            f"optim.warmup_fraction is {optim.warmup_fraction:g}; it must be in [0, 1)",
        ),
        (train.epochs > 0, f"train.epochs is {train.epochs:g}; it must be above 0"),
        (0 <= config.seed < 2**32, f"seed is {config.seed}; it must be in [0, 2^32)"),
        (bool(task.source), "task.source is empty; name files or hf:NAME"),
        (
            config.template.count(CONTENT) == 1,
            f"template must contain {CONTENT} exactly once, where the prompt goes; "
            f"it is {config.template!r}",
        ),
    ]
    positive = {
        "train.max_steps": train.max_steps,
        "train.batch_samples": train.batch_samples,
        "train.micro_batch_samples": train.micro_batch_samples,
        "task.max_samples": task.max_samples,
        "checkpoint_every_steps": config.checkpoint_every_steps,
        "log_every_steps": config.log_every_steps,
    }
    checks += [
        (value is None or value >= 1, f"{name} is {value}; it must be at least 1")
        for name, value in positive.items()
    ]
    checks.append(
        (config.cutoff_tokens >= 2, f"cutoff_tokens is {config.cutoff_tokens}; give at least 2")
    )
    return [message for passed, message in checks if not passed]


def accumulation_steps(config: FinetuneConfig, processes: int) -> int:
    """Micro-batches that each process adds up for one step.

    Raises:
        UserError: The batch cannot be divided so.
    """
    at_once = config.train.micro_batch_samples * processes
    if config.train.batch_samples % at_once:
        raise UserError(
            f"train.batch_samples {config.train.batch_samples} is no multiple of "
            f"train.micro_batch_samples {config.train.micro_batch_samples} x {processes} processes; "
            "change one of them."
        )
    return config.train.batch_samples // at_once
