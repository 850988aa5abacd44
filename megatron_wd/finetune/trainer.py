"""TRL's SFTTrainer with our settings, and the callback that logs, stops and guards checkpoints."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from megatron_wd.backend.signals import StopSignal
from megatron_wd.finetune.run_folder import COMPLETE, checkpoints_dir, keep_only
from megatron_wd.finetune.schema import FinetuneConfig, accumulation_steps
from megatron_wd.train.metrics import MetricsWriter, progress_line
from megatron_wd.train.tensorboard import ScalarEvents

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class NonFiniteError(RuntimeError):
    """The loss or the gradient is no number any more."""


def build_trainer(
    config: FinetuneConfig, model: Any, tokenizer: Any, dataset: Any, processes: int
) -> SFTTrainer:
    """Makes the trainer; nothing is trained yet.

    Args:
        config: The run.
        model: In fp32.
        tokenizer: With a padding token.
        dataset: With `input_ids` and `labels`.
        processes: Ranks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers about defaults of trl
        arguments = _arguments(config, processes)
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(config: FinetuneConfig, processes: int) -> SFTConfig:
    optim, train, on_gpu = config.optim, config.train, torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(checkpoints_dir(Path(config.run_dir))),
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        per_device_train_batch_size=train.micro_batch_samples,
        gradient_accumulation_steps=accumulation_steps(config, processes),
        learning_rate=optim.lr,
        lr_scheduler_type=_SCHEDULES[optim.schedule],
        warmup_steps=optim.warmup_fraction,  # below 1 it is a fraction
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        max_grad_norm=optim.clip_grad_norm,
        optim="adamw_torch_fused",
        seed=config.seed,
        bf16=train.precision == "bf16",
        fp16=False,
        gradient_checkpointing=train.recompute and not train.fsdp,
        fsdp=cast(Any, train.fsdp or None),
        fsdp_config={"activation_checkpointing": train.recompute} if train.fsdp else None,
        max_length=None,  # lengths were seen to, and counted, before
        save_strategy="steps",
        save_steps=config.checkpoint_every_steps,
        logging_steps=config.log_every_steps,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        ddp_backend="gloo" if processes > 1 and not on_gpu else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=on_gpu,
    )


class RunCallback(TrainerCallback):
    """Writes metrics, stops on a signal, and keeps exactly one complete checkpoint.

    Args:
        config: The run.
        stop: Set by a signal.
        resume_step: Step from which the run goes on; 0 for a new one.
    """

    def __init__(self, config: FinetuneConfig, stop: StopSignal, resume_step: int) -> None:
        self._run_dir = Path(config.run_dir)
        self._stop = stop
        self._resume_step = resume_step
        self._writer: MetricsWriter | None = None
        self._logged_at = time.monotonic()
        self._logged_step = resume_step
        self._logged_tokens: float = 0.0
        self.last_row: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Opens the files of the main rank."""
        self._logged_at, self._logged_tokens = time.monotonic(), state.num_input_tokens_seen
        if state.is_world_process_zero:
            events = ScalarEvents(self._run_dir, self._resume_step)
            self._writer = MetricsWriter(self._run_dir, self._resume_step, events)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the run after this step where a signal came to any rank."""
        if _any_rank(self._stop.requested, args):
            control.should_save = control.should_training_stop = True
        if control.should_save:
            control.should_log = True  # a checkpoint must not hold what is no number

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Writes a row of metrics."""
        if not logs or "loss" not in logs:
            return
        step, loss, norm = state.global_step, logs["loss"], logs.get("grad_norm", 0.0)
        now, tokens = time.monotonic(), state.num_input_tokens_seen
        seconds, steps = now - self._logged_at, step - self._logged_step
        row = {
            "loss": loss,
            "learning_rate": logs["learning_rate"],
            "grad_norm": norm,
            "token_accuracy": logs.get("mean_token_accuracy"),
            "entropy": logs.get("entropy"),
            "epoch": state.epoch,
            "tokens": tokens,
            "tokens_per_s": (tokens - self._logged_tokens) / max(seconds, 1e-9),
        }
        self._logged_at, self._logged_step, self._logged_tokens = now, step, tokens
        self.last_row = {"step": step, **row}
        if self._writer is not None:
            self._writer.write(step, row)
            line = progress_line(
                step,
                state.max_steps,
                loss,
                row["learning_rate"],
                norm,
                row["tokens_per_s"],
                seconds / max(steps, 1),
            )
            print(line, flush=True)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(
                f"step {step}: the loss is {loss}, the gradient norm {norm}; a lower optim.lr may help"
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the checkpoint as complete when every rank has written, then removes the others."""
        if args.world_size > 1:
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = checkpoints_dir(self._run_dir) / f"checkpoint-{state.global_step}"
            (folder / COMPLETE).write_text(json.dumps({"step": state.global_step}) + "\n")
            keep_only(self._run_dir, folder)

    def close(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()


def _any_rank(flag: bool, args: Any) -> bool:
    """Whether the flag is set on any rank, so that all ranks decide alike."""
    if args.world_size == 1:
        return flag
    flags = torch.tensor([float(flag)], device=args.device)
    torch.distributed.all_reduce(flags)
    return flags.item() > 0
