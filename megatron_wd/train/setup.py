"""Everything between a configuration and the first step: data, model, optimizer, the newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_wd.backend.world import World, run_on_main
from megatron_wd.config import Config, UserError, resolved_yaml
from megatron_wd.data.dataset import SampleStream, check_data
from megatron_wd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_wd.models.build import build_model, check_runtime, distribute_model
from megatron_wd.optim.build import build_optimizer
from megatron_wd.optim.decay import decay_table, write_decay_table
from megatron_wd.train import startup
from megatron_wd.train.checkpoint import (
    Checkpointer,
    Progress,
    interrupted_saves,
    latest_checkpoint,
    load_checkpoint,
)
from megatron_wd.train.loop import Run
from megatron_wd.train.metrics import MetricsWriter
from megatron_wd.train.step import prepare_schedules
from megatron_wd.train.throughput import peak_tflops


@dataclass
class Data:
    """What the run reads.

    Attributes:
        tokenizer: belongs to the data and goes into every checkpoint.
        train, valid: samples; `valid` is None where none is configured.
    """

    tokenizer: Tokenizer
    train: SampleStream
    valid: SampleStream | None


def set_up(config: Config, world: World, *, dry_run: bool) -> Run | None:
    """Builds the run and loads the newest checkpoint of its folder. Collective.

    Args:
        config: validated.
        world: this rank's place.
        dry_run: only checks and prints the summary; nothing is written.

    Returns:
        The run to train, or None after a dry run.

    Raises:
        UserError: on every rank, whatever rank found it.
    """
    check_runtime(config)
    data = _open_data(config)
    lock: list[IO[str]] = []  # held by the main rank while the run exists

    def check() -> None:
        _check_data(config, data)
        if not dry_run:
            lock.append(startup.prepare_run_dir(config, resolved_yaml(config)))

    run_on_main(world, check)
    model = distribute_model(build_model(config), config)
    optimizer = build_optimizer(model, config)
    prepare_schedules(model, optimizer)
    decay = decay_table(model, config)
    peak = peak_tflops(config)
    if world.is_main:
        tokens = sum(len(file.tokens) for file in data.train.files)
        print(startup.summary(config, world, decay, tokens, peak), flush=True)
    if dry_run:
        return None

    run_dir = Path(config.run_dir)
    newest = latest_checkpoint(run_dir)
    progress = load_checkpoint(newest, model, optimizer) if newest else Progress()
    if progress.step > config.steps:
        raise UserError(
            f"run_dir {run_dir} has {progress.step} steps already, more than the {config.steps} of this "
            "config. Train longer, or choose another run_dir."
        )
    metrics: list[MetricsWriter] = []  # of the main rank

    def write_start() -> None:
        write_decay_table(decay, run_dir / "weight_decay.tsv")
        startup.write_provenance(config, world)
        metrics.append(MetricsWriter(config, progress.step))
        for name in interrupted_saves(run_dir):
            print(f"warning: an earlier save of {name} was cut off; it is ignored and removed")
        if newest is not None:
            print(f"resuming from {newest} (step {progress.step})", flush=True)

    run_on_main(world, write_start)
    return Run(
        config=config,
        world=world,
        model=model,
        optimizer=optimizer,
        train_data=data.train,
        valid_data=data.valid,
        checkpointer=Checkpointer(config, model, optimizer, world, data.tokenizer.save),
        progress=progress,
        metrics=metrics[0] if metrics else None,
        peak_tflops=peak[0],
        lock=lock,
    )


def _open_data(config: Config) -> Data:
    sequence = config.train.sequence_tokens
    return Data(
        tokenizer=load_tokenizer(config.data.tokenizer),
        train=SampleStream(config.data.train, sequence, config.seed),
        # Validation does not follow the run's seed: runs of a sweep are measured on the same tokens.
        valid=SampleStream(config.data.valid, sequence, 0) if config.data.valid else None,
    )


def _check_data(config: Config, data: Data) -> None:
    vocab_size = config.model.vocab_size
    if data.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {config.data.tokenizer} has {data.tokenizer.vocab_size} ids, more than "
            f"model.vocab_size={vocab_size}. Set model.vocab_size to at least that."
        )
    check_data(data.train, vocab_size, data.tokenizer.sha256)
    if data.valid is None:
        return
    check_data(data.valid, vocab_size, data.tokenizer.sha256)
    if data.valid.num_samples() < config.evaluate.samples:
        raise UserError(
            f"evaluate.samples={config.evaluate.samples}, but data.valid holds only "
            f"{data.valid.num_samples()} samples of {config.train.sequence_tokens} tokens. Lower "
            "evaluate.samples."
        )
