"""TensorBoard event files that a person wants to open: grouped curves, a dashboard that puts together what
belongs together, hyperparameters by which the runs of a sweep compare, and cards with config and decay.

The names are those of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wd.config import Config
from megatron_wd.optim.rules import ParameterRule

_MULTILINE = "Multiline"

# Dashboard -> chart -> patterns of names, for the custom-scalars plugin.
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Losses": {
        "training and validation": [_MULTILINE, ["loss/train", "loss/valid", "loss/seen"]],
        "train-validation gap": [_MULTILINE, ["loss/gap"]],
        "z-loss": [_MULTILINE, ["loss/z"]],
    },
    "Rates": {
        "learning rate": [_MULTILINE, ["^lr$"]],
        "weight decay": [_MULTILINE, ["^weight_decay$"]],
        "decay's share of the update": [_MULTILINE, ["decay_share/.*"]],
    },
    "Effective learning rate": {
        "measured and at equilibrium": [
            _MULTILINE,
            ["effective_lr/(mean|rms|joint)", "equilibrium_effective_lr/mean"],
        ],
        "by kind": [_MULTILINE, ["^effective_lr/(?!mean|rms|joint)"]],
        "by layer": [_MULTILINE, ["effective_lr_by_layer/.*"]],
    },
    "Norms": {
        "weights by kind": [_MULTILINE, ["^weight_norm/.*"]],
        "weights by layer": [_MULTILINE, ["weight_norm_by_layer/.*"]],
        "at equilibrium": [_MULTILINE, ["equilibrium_norm/.*"]],
        "how far relaxed": [_MULTILINE, ["relaxed/.*"]],
        "gradients": [_MULTILINE, ["^grad_norm$", "gradient_norm/.*"]],
        "updates": [_MULTILINE, ["update_norm/.*"]],
    },
    "Throughput": {
        "tokens per second": [_MULTILINE, ["tokens_per_s"]],
        "model FLOP utilization": [_MULTILINE, ["mfu"]],
        "seconds per step": [_MULTILINE, ["step_s"]],
        "memory": [_MULTILINE, ["memory_bytes"]],
    },
}
# What the hparams plugin compares runs by.
METRICS = ("loss/valid", "loss/train", "loss/gap", "effective_lr/mean", "weight_norm/all")


class ScalarEvents:
    """Writes rows of numbers into the event files of a run folder."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        """Opens the files; events after `resume_step` are taken back (0 for a new run)."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Adds a row; values that are None are left out."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()


class TensorBoard(ScalarEvents):
    """The event files of a pretraining run, which describe it too."""

    def __init__(
        self, config: Config, rules: Mapping[str, ParameterRule], resolved: str, resume_step: int
    ) -> None:
        """Opens the files and describes the run.

        Args:
            config: the run.
            rules: what was decided for each parameter.
            resolved: the resolved config as YAML.
            resume_step: events after it are taken back; 0 for a new run.
        """
        from torch.utils.tensorboard.summary import hparams

        super().__init__(Path(config.run_dir), resume_step)
        self._writer.add_custom_scalars(layout(config))
        self._writer.add_text("config", "```yaml\n" + resolved + "```", resume_step)
        self._writer.add_text("weight_decay", _table(rules), resume_step)
        session = hparams(hyperparameters(config), dict.fromkeys(METRICS, 0.0))
        experiment, start, self._session_end = session
        self._add(experiment)
        self._add(start)

    def close(self) -> None:
        """Ends the session and closes the files."""
        self._add(self._session_end)
        super().close()

    def _add(self, summary: Any) -> None:
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(summary)


def hyperparameters(config: Config) -> dict[str, bool | str | float | int]:
    """What runs of a sweep differ in.

    TensorBoard shows the first five in the order of the alphabet, so that the names begin with what sweeps
    are about: lambda (`optim.weight_decay`) and the learning rates.
    """
    optim, model = config.optim, config.model
    values: dict[str, Any] = {
        "lambda": optim.weight_decay,
        "lr": optim.lr,
        "lr_matrix": optim.matrix_lr,
        "lr_schedule": optim.schedule,
        "model": f"{model.family} {model.num_layers} x {model.hidden_size}",
        "optimizer": optim.optimizer,
        "precision": config.precision,
        "rules": optim.decay or "custom",
        "seed": config.seed,
        "tokens": config.total_tokens,
        "tokens_per_step": config.train.step_tokens,
        "weight_decay_mode": optim.decay_mode,
        "weight_decay_schedule": optim.decay_schedule.shape,
    }
    return {name: value for name, value in values.items() if value is not None}


def layout(config: Config) -> dict[str, dict[str, list[Any]]]:
    """The dashboard, without charts that a run leaves empty."""
    losses = dict(LAYOUT["Losses"])
    if config.train.z_loss == 0.0:
        del losses["z-loss"]
    charts = {**LAYOUT, "Losses": losses}
    if config.log.matrices_every_steps is None:
        del charts["Effective learning rate"], charts["Norms"]
    return charts


def _table(rules: Mapping[str, ParameterRule]) -> str:
    """The decay table in Markdown."""
    lines = [
        "| parameter | shape | rule | weight decay | lr multiplier | optimizer |",
        "|---|---|---|---|---|---|",
    ]
    for rule in rules.values():
        shape = " x ".join(map(str, rule.shape))
        lines.append(
            f"| {rule.name} | {shape} | `{rule.rule}` | {rule.weight_decay:g} | "
            f"{rule.lr_multiplier:g} | {rule.optimizer} |"
        )
    return "\n".join(lines)
