"""The training loop: read it top to bottom.

A step is: this rank's samples -> forward and backward over all micro-batches -> the loss, agreed on by all
ranks -> clip and update -> now and then log, evaluate, save. Everything random or scheduled is a function
of the step, so a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron_wd.backend.signals import StopSignal
from megatron_wd.backend.world import World, memory_bytes, seed_step
from megatron_wd.config import Config
from megatron_wd.data.dataset import SampleStream
from megatron_wd.optim.build import RatedOptimizer
from megatron_wd.optim.measure import StepMeter
from megatron_wd.optim.schedule import decay_factor, learning_rate
from megatron_wd.train.batches import evaluation_batches, train_batches
from megatron_wd.train.checkpoint import Checkpointer, Progress
from megatron_wd.train.matrices_log import MatricesLog
from megatron_wd.train.metrics import MetricsWriter, Row, Stopwatch, progress_line
from megatron_wd.train.step import (
    NonFiniteError,
    StepLoss,
    agree,
    evaluate,
    forward_backward,
    update,
)
from megatron_wd.train.throughput import flops_per_token


@dataclass
class Run:
    """What the loop works on.

    Attributes:
        config: the run's configuration.
        world: this rank's place.
        model: this rank's chunks, wrapped for data parallelism.
        optimizer: updates them.
        train_data, valid_data: samples; no validation data, no evaluation.
        checkpointer: saves.
        progress: where the run stands.
        meter: measures what a step does to every matrix; None where that is turned off.
        metrics: writes rows; None on all ranks but the main one.
        matrices_log: keeps the measures of every matrix; likewise.
        peak_tflops: of one rank, for `mfu`; None where unknown.
        lock: keeps other runs out of the run folder.
    """

    config: Config
    world: World
    model: list[nn.Module]
    optimizer: RatedOptimizer
    train_data: SampleStream
    valid_data: SampleStream | None
    checkpointer: Checkpointer
    progress: Progress
    meter: StepMeter | None
    metrics: MetricsWriter | None
    matrices_log: MatricesLog | None
    peak_tflops: float | None
    lock: object


def train(run: Run, stop: StopSignal) -> bool:
    """Trains to the last step or until a signal; saves in both cases.

    Returns:
        True when the run is complete, False when a signal stopped it after saving.

    Raises:
        NonFiniteError: a loss or gradient is NaN or infinite; nothing is saved after the last good step.
    """
    config, world, progress = run.config, run.world, run.progress
    watch = Stopwatch()

    while progress.step < config.steps:
        step = progress.step + 1
        started = time.perf_counter()

        seed_step(config.seed, step)
        batches = list(
            train_batches(
                run.train_data,
                world,
                progress.consumed_samples,
                config.train.global_batch_samples,
                config.train.micro_batch_samples,
            )
        )
        local_loss = forward_backward(run.model, run.optimizer.megatron, batches, config)
        lr = learning_rate(step, config)
        try:
            loss, stop_now = agree(local_loss, stop.requested, world)
            run.optimizer.set_rates(step)
            meter = run.meter if _due(step, config.log.matrices_every_steps, False) else None
            grad_norm, measures = update(run.model, run.optimizer, config, world, meter)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {step}: {error} is not finite; stopped before the weights changed"
            ) from None

        progress.advance(config.train.global_batch_samples, run.optimizer.decayed(step))
        watch.add(time.perf_counter() - started)

        at_end = step == config.steps
        row: Row = {}
        if _due(step, config.log.every_steps, at_end):
            row |= _measure(run, watch, loss, lr, grad_norm)
        if measures is not None and run.matrices_log is not None:
            row |= run.matrices_log.add(step, measures, progress.relaxed)
        if run.valid_data is not None and _due(step, config.evaluate.every_steps, at_end):
            row |= _evaluate(run, run.valid_data)
        if row and run.metrics is not None:
            run.metrics.write(step, row)
        run.checkpointer.poll()
        if _due(step, config.checkpoint.every_steps, at_end or stop_now):
            if run.matrices_log is not None:
                run.matrices_log.flush()
            run.checkpointer.save(progress)
        if stop_now:
            run.checkpointer.wait()
            if world.is_main:
                print(
                    f"stopped by a signal after step {step}; saved. The same command goes on.",
                    flush=True,
                )
            return at_end

    run.checkpointer.wait()
    if world.is_main:
        print(f"done: {config.steps} steps, {Path(config.run_dir) / 'checkpoints'}", flush=True)
    return True


def _due(step: int, every: int | None, force: bool) -> bool:
    return force or (every is not None and step % every == 0)


def _measure(run: Run, watch: Stopwatch, loss: StepLoss, lr: float, grad_norm: float) -> Row:
    """Losses and norms are this step's; times are means since the row before. Collective."""
    config, step = run.config, run.progress.step
    used_bytes = memory_bytes(run.world)
    seconds, steps = watch.read()
    step_s = seconds / steps
    tokens_per_s = config.train.step_tokens / step_s
    per_token = flops_per_token(config.model, config.train.sequence_tokens)
    tflops = per_token * tokens_per_s / run.world.size / 1e12
    if run.world.is_main:
        line = progress_line(step, config.steps, loss.loss, lr, grad_norm, tokens_per_s, step_s)
        print(line, flush=True)
    return {
        "loss/train": loss.loss,
        **({} if loss.z_loss is None else {"loss/z": loss.z_loss}),
        "lr": lr,
        "weight_decay": config.optim.weight_decay * decay_factor(step, config),
        "grad_norm": grad_norm,
        "tokens": run.progress.consumed_samples * config.train.sequence_tokens,
        "tokens_per_s": tokens_per_s,
        "tflops": tflops,
        "mfu": tflops / run.peak_tflops if run.peak_tflops else None,
        "step_s": step_s,
        "memory_bytes": used_bytes,
    }


def _evaluate(run: Run, data: SampleStream) -> Row:
    """The loss on the same validation tokens at every evaluation and, once they have been seen, on the
    first training tokens with the same weights; their difference is the train-validation gap. Collective.
    """
    config, step = run.config, run.progress.step
    started = time.perf_counter()
    row: Row = {"loss/valid": _loss_on(run, data, config.evaluate.samples)}
    seen_samples = config.evaluate.seen
    if 0 < seen_samples <= run.progress.consumed_samples:
        row["loss/seen"] = _loss_on(run, run.train_data, seen_samples)
        row["loss/gap"] = row["loss/valid"] - row["loss/seen"]  # type: ignore[operator]
    if run.world.is_main:
        seconds = time.perf_counter() - started
        gap = f", gap {row['loss/gap']:+.4f}" if "loss/gap" in row else ""
        print(
            f"step {step}  validation loss {row['loss/valid']:.4f}{gap}  ({seconds:.1f} s)",
            flush=True,
        )
    return row


def _loss_on(run: Run, data: SampleStream, samples: int) -> float:
    """Mean loss on the first samples of a stream, in nats per token."""
    config = run.config
    micro_batch, multiple = config.train.micro_batch_samples, config.parallel.pipeline
    batches = evaluation_batches(data, run.world, samples, micro_batch, multiple)
    return evaluate(run.model, list(batches), config, run.world)
