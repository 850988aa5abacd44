"""From a configuration to a finished run on this rank: what each worker process does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_wd.config import Config, UserError, resolved_yaml, validate_world


def run(config: Config, *, dry_run: bool = False) -> int:
    """Trains, or resumes, the run that a configuration describes.

    Args:
        config: validated.
        dry_run: checks configuration, data and layout, prints the summary and stops there.

    Returns:
        The exit code: 0 done, 1 stopped on a NaN, 2 wrong use, 3 stopped on a signal after saving.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        validate_world(config, int(os.environ.get("WORLD_SIZE", "1")))
        return _run(config, dry_run)
    except UserError as error:
        if is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(config: Config, dry_run: bool) -> int:
    # Signals are taken before the slow imports: a run that is stopped early still exits cleanly.
    from megatron_wd.backend.signals import StopSignal

    stop = StopSignal()
    from megatron_wd.backend.world import start_world, stop_world
    from megatron_wd.train.loop import train
    from megatron_wd.train.step import NonFiniteError

    world = start_world(config.parallel)
    metrics = None
    try:
        state = build_run(config, world, dry_run=dry_run)
        if state is None:
            return 0
        metrics = state.metrics
        finished = train(state, stop)
        return 0 if finished else 3
    except NonFiniteError as error:
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if metrics is not None:
            metrics.close()
        stop.restore()
        stop_world()


def build_run(config: Config, world, *, dry_run: bool):  # noqa: ANN001, ANN201
    """Opens the data, builds model and optimizer, and loads the newest checkpoint of the run folder.

    Returns:
        The `Run` to train, or None after a dry run.

    Raises:
        UserError: on every rank, whatever rank found it.
    """
    import torch.distributed as dist

    from megatron_wd.backend.world import run_on_main
    from megatron_wd.data.dataset import SampleStream, check_data
    from megatron_wd.data.tokenizer import load_tokenizer
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

    check_runtime(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    sequence = config.train.sequence_tokens
    train_data = SampleStream(config.data.train, sequence, config.seed)
    valid_data = SampleStream(config.data.valid, sequence, 0) if config.data.valid else None
    run_dir = Path(config.run_dir)

    def check_files() -> None:
        if tokenizer.vocab_size > config.model.vocab_size:
            raise UserError(
                f"tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} ids, more than "
                f"model.vocab_size={config.model.vocab_size}. Set model.vocab_size to at least that."
            )
        for stream in filter(None, (train_data, valid_data)):
            check_data(stream, config.model.vocab_size, tokenizer.sha256)
        if valid_data is not None and valid_data.num_samples() < config.evaluate.samples:
            raise UserError(
                f"evaluate.samples={config.evaluate.samples}, but data.valid holds only "
                f"{valid_data.num_samples()} samples of {sequence} tokens. Lower evaluate.samples."
            )
        if not dry_run:
            startup.prepare_run_dir(config, resolved_yaml(config))

    run_on_main(world, check_files)
    model = distribute_model(build_model(config), config)
    optimizer = build_optimizer(model, config)
    prepare_schedules(model, optimizer)
    decay = decay_table(model, config)
    peak = peak_tflops(config)
    if world.is_main:
        tokens = sum(len(file.tokens) for file in train_data.files)
        print(startup.summary(config, world, decay, tokens, peak), flush=True)
    if dry_run:
        return None

    progress = Progress()
    newest = latest_checkpoint(run_dir)
    if newest is not None:
        progress = load_checkpoint(newest, model, optimizer)
    if world.is_main:
        write_decay_table(decay, run_dir / "weight_decay.tsv")
        startup.write_provenance(config, world)
        for name in interrupted_saves(run_dir):
            print(f"warning: an earlier save of {name} was cut off; it is ignored and removed")
        if newest is not None:
            print(f"resuming from {newest} (step {progress.step})", flush=True)
    dist.barrier()
    return Run(
        config=config,
        world=world,
        model=model,
        optimizer=optimizer,
        train_data=train_data,
        valid_data=valid_data,
        checkpointer=Checkpointer(config, model, optimizer, world, tokenizer.save),
        progress=progress,
        metrics=MetricsWriter(config, progress.step) if world.is_main else None,
        peak_tflops=peak[0],
    )

