"""Everything between a configuration and the first step: data, model, optimizer, the newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import torch

from megatron_wd.backend.world import World, run_on_main
from megatron_wd.config import Config, UserError, resolved_yaml
from megatron_wd.models.build import build_model, check_runtime, distribute_model
from megatron_wd.optim.build import build_optimizer
from megatron_wd.optim.matrices import gather_shapes, master_weights
from megatron_wd.optim.measure import StepMeter
from megatron_wd.optim.rules import resolve_rules, table_text
from megatron_wd.train import startup
from megatron_wd.train.checkpoint import (
    Checkpointer,
    Progress,
    interrupted_saves,
    latest_checkpoint,
    load_checkpoint,
)
from megatron_wd.train.initial_weights import check_origin, load_initial_weights
from megatron_wd.train.inputs import check_data_fits, open_data
from megatron_wd.train.loop import Run
from megatron_wd.train.matrices_log import MatricesLog
from megatron_wd.train.metrics import MetricsWriter
from megatron_wd.train.step import prepare_schedules
from megatron_wd.train.tensorboard import TensorBoard
from megatron_wd.train.throughput import peak_tflops


def set_up(config: Config, world: World) -> Run:
    """Builds the run and loads the newest checkpoint of its folder. Collective.

    Args:
        config: validated.
        world: this rank's place.

    Returns:
        The run to train.

    Raises:
        UserError: on every rank, whatever rank found it.
    """
    check_runtime(config)
    data = open_data(config)
    run_on_main(world, lambda: check_data_fits(config, data))
    run_dir = Path(config.run_dir)
    newest = latest_checkpoint(run_dir)
    check_origin(config)
    chunks = build_model(config)
    if config.init_from is not None and newest is None:
        weights = load_initial_weights(chunks, config, data.tokenizer)
        if world.is_main:
            print(f"starting from the weights of the {weights.description}", flush=True)
    model = distribute_model(chunks, config)
    rules = resolve_rules(gather_shapes(model), config)
    optimizer = build_optimizer(model, config, rules)
    prepare_schedules(model, optimizer.megatron)

    # Only now, so that a run which cannot start leaves nothing behind.
    lock: list[IO[str]] = []  # held by the main rank while the run exists
    changes: list[str] = []
    resolved = resolved_yaml(config)
    run_on_main(world, lambda: lock.append(startup.prepare_run_dir(config, resolved, changes)))
    peak = peak_tflops(config)
    if world.is_main:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        who = f"{world.size} x {device}"
        summary = startup.summary(config, world.size, who, rules, data.train_tokens, peak)
        print(summary, flush=True)

    progress = load_checkpoint(newest, model, optimizer) if newest else Progress()
    if progress.step > config.steps:
        raise UserError(
            f"run_dir {run_dir} has {progress.step} steps already, more than the {config.steps} of this "
            "config. Train longer, or choose another run_dir."
        )
    measured = config.log.matrices_every_steps is not None
    masters = list(master_weights(model, optimizer.megatron))
    meter = None
    if measured:
        meter = StepMeter(masters, optimizer.matrices, config.model, config.optim.beta1)
    metrics: list[MetricsWriter] = []  # of the main rank, as is the log of matrices
    matrices_log: list[MatricesLog] = []

    def write_start() -> None:
        (run_dir / "weight_decay.tsv").write_text(table_text(rules.values()))
        startup.write_provenance(config, world)
        startup.record_changes(run_dir, progress.step, changes)
        tensorboard = None
        if config.log.tensorboard:
            tensorboard = TensorBoard(config, rules, resolved, progress.step)
        metrics.append(MetricsWriter(run_dir, progress.step, tensorboard))
        if measured:
            matrices_log.append(MatricesLog(run_dir, optimizer.matrices, progress.step))
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
        meter=meter,
        metrics=metrics[0] if metrics else None,
        matrices_log=matrices_log[0] if matrices_log else None,
        peak_tflops=peak[0],
        lock=lock,
    )
