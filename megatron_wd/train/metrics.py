"""What a run leaves behind: metrics.jsonl, TensorBoard events and a progress line, with the same names.

metrics.jsonl has one row for each logged step; a row holds `step`, `time_s` (seconds since the epoch) and
whatever was measured at that step. On resume, rows past the checkpoint are cut off, so that steps increase.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from megatron_wd.train.tensorboard import ScalarEvents

Row = dict[str, float | int | None]


class MetricsWriter:
    """Writes rows on the main rank."""

    def __init__(self, run_dir: Path, resume_step: int, tensorboard: ScalarEvents | None) -> None:
        """Opens metrics.jsonl.

        Args:
            run_dir: the run's folder.
            resume_step: rows after this step are dropped; 0 for a new run.
            tensorboard: gets the same rows; None where it is turned off.
        """
        self.path = run_dir / "metrics.jsonl"
        self._truncate(resume_step)
        self._file = self.path.open("a", buffering=1)
        self._tensorboard = tensorboard

    def write(self, step: int, values: Row) -> None:
        """Appends one row."""
        self._file.write(
            json.dumps({"step": step, "time_s": round(time.time(), 3), **values}) + "\n"
        )
        if self._tensorboard is not None:
            self._tensorboard.write(step, values)

    def close(self) -> None:
        """Flushes and closes all files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _truncate(self, resume_step: int) -> None:
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a killed run was writing
            if row["step"] <= resume_step:
                kept.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.path)


class Stopwatch:
    """Seconds spent in training steps since the last reading; evaluation and saving are left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0

    def add(self, seconds: float) -> None:
        """Counts one step."""
        self.seconds += seconds
        self.steps += 1

    def read(self) -> tuple[float, int]:
        """(seconds, steps) since the last reading, and starts over."""
        result = (self.seconds, self.steps)
        self.seconds, self.steps = 0.0, 0
        return result


def progress_line(
    step: int,
    steps: int,
    loss: float,
    lr: float,
    grad_norm: float,
    tokens_per_s: float,
    step_s: float,
) -> str:
    """One line for the terminal, with the time that is left."""
    left_s = round((steps - step) * step_s)
    hours, minutes, seconds = left_s // 3600, left_s // 60 % 60, left_s % 60
    eta = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {loss:7.4f}  lr {lr:.2e}  "
        f"grad norm {grad_norm:7.3f}  {tokens_per_s:,.0f} tokens/s  ETA {eta}"
    )
