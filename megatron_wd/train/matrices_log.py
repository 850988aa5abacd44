"""What steps did to every matrix, as numbers for TensorBoard and as a table of all of them.

`matrices/FIRST-LAST.parquet` in the run folder holds one row per step and matrix; reading the folder reads
them all. A part is written when the run is saved, and never changes; after a resume, rows of steps that are
done again are dropped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wd.config import UserError
from megatron_wd.optim.matrices import Matrix
from megatron_wd.optim.measure import StepMeasures

if TYPE_CHECKING:
    import pyarrow as pa

_FLUSH_STEPS = 100
"""Steps that are kept in memory at most."""


class MatricesLog:
    """Collects measures of steps and writes them in parts."""

    def __init__(self, run_dir: Path, matrices: list[Matrix], step: int) -> None:
        """Opens the table of a run that stands at a step; later rows are dropped."""
        self._folder, self._matrices = run_dir / "matrices", matrices
        self._rows: list[pa.Table] = []
        self._steps: list[int] = []
        if not self._folder.is_dir():
            return
        # Imported where it is used: it starts threads, and only the main rank needs it.
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        for part in sorted(self._folder.glob("*.parquet")):
            first, last = (int(number) for number in part.stem.split("-"))
            if last <= step:
                continue
            if first <= step:
                try:
                    kept = pq.read_table(part).filter(pc.field("step") <= step)
                except (OSError, pa.ArrowInvalid) as error:
                    raise UserError(
                        f"{part} is damaged: {error}. It is needed up to step {step}; remove it to go on "
                        "without what it holds."
                    ) from error
                self._write(kept, first, step)
            part.unlink()

    def add(
        self, step: int, measures: StepMeasures, relaxed_of: Callable[[str], float]
    ) -> dict[str, float | None]:
        """Adds the rows of a step, one for each matrix, and returns what they come to (`aggregate`).

        Args:
            step: the step.
            measures: of all matrices.
            relaxed_of: how far the norm of a parameter has relaxed, 0 to 1.
        """
        import pyarrow as pa

        relaxed = torch.tensor([relaxed_of(m.parameter) for m in self._matrices]).double()
        count = len(self._matrices)
        columns: dict[str, Any] = {
            "step": pa.array([step] * count, pa.int64()),
            "matrix": [matrix.name for matrix in self._matrices],
            "kind": [matrix.kind for matrix in self._matrices],
            "block": pa.array([matrix.block for matrix in self._matrices], pa.int32()),
            "parameter": [matrix.parameter for matrix in self._matrices],
        }
        for field in fields(measures):
            columns[field.name] = getattr(measures, field.name).numpy()
        columns["relaxed"] = relaxed.numpy()
        self._rows.append(pa.table(columns))
        self._steps.append(step)
        if len(self._steps) >= _FLUSH_STEPS:
            self.flush()
        return aggregate(measures, relaxed, self._matrices)

    def flush(self) -> None:
        """Writes what has been collected."""
        if self._rows:
            import pyarrow as pa

            self._write(pa.concat_tables(self._rows), self._steps[0], self._steps[-1])
        self._rows, self._steps = [], []

    def _write(self, table: pa.Table, first: int, last: int) -> None:
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{first:08d}-{last:08d}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)


def aggregate(
    measures: StepMeasures, relaxed: Tensor, matrices: list[Matrix]
) -> dict[str, float | None]:
    """Measures of all matrices as a row of metrics, by kind and by layer.

    Norms of several matrices are those of the vector of all their values. Rates and shares are means over
    matrices. For the effective rate of all hidden matrices there are three numbers, since the sources leave
    it open: `mean` and `rms` over matrices, and `joint` of the one vector that they make up.
    """
    row: dict[str, float | None] = {}
    kinds = list(dict.fromkeys(matrix.kind for matrix in matrices))
    for kind in kinds:
        members = _where(matrix.kind == kind for matrix in matrices)
        _add(row, kind, measures, relaxed, members, is_rated=kind not in ("norm", "bias"))
    everything = torch.arange(len(matrices))
    for name in ("weight_norm", "gradient_norm", "update_norm"):
        row[f"{name}/all"] = _norm(getattr(measures, name), everything)
    hidden = _where(matrix.is_hidden for matrix in matrices)
    rates = measures.effective_lr[hidden]
    row["effective_lr/mean"] = float(rates.mean())
    row["effective_lr/rms"] = float(rates.square().mean().sqrt())
    row["effective_lr/joint"] = _norm(measures.joint_effective_lr, hidden)
    row["equilibrium_effective_lr/mean"] = float(measures.equilibrium_effective_lr[hidden].mean())
    blocks = sorted({matrix.block for matrix in matrices if matrix.block is not None})
    width = len(str(blocks[-1])) if blocks else 1
    for block in blocks:
        members = _where(matrix.block == block and matrix.is_hidden for matrix in matrices)
        label = f"{block:0{width}d}"
        row[f"effective_lr_by_layer/{label}"] = float(measures.effective_lr[members].mean())
        row[f"weight_norm_by_layer/{label}"] = _norm(measures.weight_norm, members)
    return row


def _add(
    row: dict[str, float | None],
    kind: str,
    measures: StepMeasures,
    relaxed: Tensor,
    members: Tensor,
    *,
    is_rated: bool,
) -> None:
    row[f"weight_norm/{kind}"] = _norm(measures.weight_norm, members)
    row[f"gradient_norm/{kind}"] = _norm(measures.gradient_norm, members)
    row[f"update_norm/{kind}"] = _norm(measures.update_norm, members)
    if not is_rated:
        return
    row[f"effective_lr/{kind}"] = float(measures.effective_lr[members].mean())
    row[f"decay_share/{kind}"] = float(measures.decay_share[members].mean())
    row[f"relaxed/{kind}"] = float(relaxed[members].mean())
    row[f"equilibrium_effective_lr/{kind}"] = float(
        measures.equilibrium_effective_lr[members].mean()
    )
    norm = _norm(measures.equilibrium_norm, members)
    row[f"equilibrium_norm/{kind}"] = norm if math.isfinite(norm) else None


def _where(flags: Iterable[bool]) -> Tensor:
    return torch.tensor([index for index, flag in enumerate(flags) if flag])


def _norm(values: Tensor, members: Tensor) -> float:
    """Norm of the vector of several matrices, from their norms."""
    return float(values[members].square().sum().sqrt())
