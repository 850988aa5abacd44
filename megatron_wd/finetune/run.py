"""From a configuration to an exit code: one fine-tuning run, begun or resumed.

torch and its friends are imported inside: mistakes in a config are told at once, and signals are
taken before the slow imports.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from megatron_wd.backend.launch import count_gpus
from megatron_wd.backend.signals import StopSignal
from megatron_wd.config import UserError
from megatron_wd.config.cli import EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from megatron_wd.finetune.run_folder import (
    HF_FOLDER,
    keep_only,
    keep_record,
    lock_run_dir,
    newest_checkpoint,
    provenance,
)
from megatron_wd.finetune.schema import FinetuneConfig, accumulation_steps
from megatron_wd.finetune.tokens import DataReport


def run(config: FinetuneConfig, dry_run: bool = False) -> int:
    """Fine-tunes, or goes on, or says that all is done.

    Args:
        config: Checked.
        dry_run: Read model and data, say what would happen, and stop.

    Returns:
        0 done, 1 stopped because the loss was no number, 3 stopped by a signal after saving.

    Raises:
        UserError: Config, model, data or machine do not allow it; before training.
    """
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    accumulation_steps(config, processes)
    if config.train.fsdp and not (processes > 1 and count_gpus()):
        # accelerate would go on without, and say nothing.
        raise UserError(
            "train.fsdp shares a model among several GPUs; start it there with torchrun, or leave it out."
        )
    stop = StopSignal()
    lock: IO[str] | None = None
    try:
        if not dry_run and rank == 0:
            lock = lock_run_dir(config)
        if not dry_run and is_done(config):
            if rank == 0:
                print(f"{Path(config.run_dir) / HF_FOLDER} is there: this run is done", flush=True)
            return EXIT_DONE
        return _run(config, dry_run, processes, rank, stop)
    finally:
        stop.restore()
        if lock is not None:
            lock.close()


def is_done(config: FinetuneConfig) -> bool:
    """Whether the run has ended and left its model."""
    return (Path(config.run_dir) / HF_FOLDER).is_dir()


def _run(config: FinetuneConfig, dry_run: bool, processes: int, rank: int, stop: StopSignal) -> int:
    from megatron_wd.finetune.base_model import model_sha256, open_base_model
    from megatron_wd.finetune.tokens import as_dataset, prepare_samples

    base = open_base_model(config)
    started = time.monotonic()
    samples, report, warnings = prepare_samples(config, base.tokenizer)
    if rank == 0:
        print(_summary(config, report, processes, time.monotonic() - started), flush=True)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    if dry_run:
        return EXIT_DONE
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {}
    run_dir = Path(config.run_dir)
    if rank == 0:
        record = provenance(base.folder, model_sha256(base.folder), processes, device)
        keep_record(run_dir, "provenance.json", record, same="base_model_sha256")
        keep_record(run_dir, "data.json", asdict(report), same="sha256")
    return _train(config, base, as_dataset(samples), {**record, "data": asdict(report)}, stop)


def _train(
    config: FinetuneConfig, base: Any, dataset: Any, record: dict[str, Any], stop: StopSignal
) -> int:
    import datasets

    from megatron_wd.convert.hf_load import load_model
    from megatron_wd.finetune.export import export
    from megatron_wd.finetune.trainer import NonFiniteError, RunCallback, build_trainer

    datasets.disable_progress_bars()
    run_dir, processes = Path(config.run_dir), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = build_trainer(config, load_model(base.folder), base.tokenizer, dataset, processes)
    checkpoint = newest_checkpoint(run_dir)
    if trainer.is_world_process_zero():
        keep_only(run_dir, checkpoint)
        if checkpoint is not None:
            print(f"going on from {checkpoint}", flush=True)
    step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    callback = RunCallback(config, stop, step)
    trainer.add_callback(callback)
    began = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except NonFiniteError as error:
        if trainer.is_world_process_zero():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    finally:
        callback.close()
    state = trainer.state
    if state.global_step < state.max_steps:
        if trainer.is_world_process_zero():
            print(f"stopped at step {state.global_step} of {state.max_steps}, saved", flush=True)
        return EXIT_SAVED
    # The last row; on a run that only had to export, of what was trained before.
    record["steps"] = state.global_step
    record["final"] = callback.last_row or next(
        (
            {"step": row["step"], "loss": row["loss"]}
            for row in reversed(state.log_history)
            if "loss" in row
        ),
        {},
    )
    folder = export(config, base, trainer, record)
    if trainer.is_world_process_zero():
        keep_only(run_dir, None)  # they served to go on, and take three times the model's room
        print(f"{folder} written; trained for {time.monotonic() - began:.0f} s", flush=True)
    return EXIT_DONE


def _summary(config: FinetuneConfig, report: DataReport, processes: int, seconds: float) -> str:
    optim, train = config.optim, config.train
    left_out = f"{report.empty:,} empty, {report.over_long:,} over {config.cutoff_tokens} tokens"
    fate = f" ({report.cut:,} cut, {report.dropped:,} left out)" if report.over_long else ""
    share = report.response_tokens / report.tokens
    length = f"{train.epochs:g} epochs" if train.max_steps is None else f"{train.max_steps} steps"
    return (
        f"model {config.model}\n"
        f"task {config.task.name}: {report.rows:,} rows, {report.kept:,} kept, {report.samples:,} samples; "
        f"{left_out}{fate}\n"
        f"tokens {report.tokens:,}, {share:.0%} of them in responses; longest example "
        f"{report.longest_tokens:,} (read in {seconds:.1f} s)\n"
        f"{length}, {train.batch_samples} samples a step on {processes} "
        f"{'process' if processes == 1 else 'processes'}, {train.precision}; AdamW, lr {optim.lr:g}, "
        f"{optim.schedule}, weight decay {optim.weight_decay:g}, seed {config.seed}"
    )
