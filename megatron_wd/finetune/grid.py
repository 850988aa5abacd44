"""Every combination of some values, one run after the other, and one table of all."""

from __future__ import annotations

import csv
import gc
import io
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.config.cli import EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from megatron_wd.finetune.export import MARK
from megatron_wd.finetune.run import run
from megatron_wd.finetune.run_folder import HF_FOLDER, write_whole
from megatron_wd.finetune.schema import FinetuneConfig, load_finetune_config

_RESULTS = ("state", "steps", "final_loss", "folder")


@dataclass
class Cell:
    """One combination: its values by key, and its run."""

    values: dict[str, str]
    config: FinetuneConfig


def parse_axes(axes: Sequence[str]) -> dict[str, list[str]]:
    """Reads `key=A,B` arguments.

    Raises:
        UserError: One is something else, or a key comes twice.
    """
    parsed: dict[str, list[str]] = {}
    for axis in axes:
        key, equals, text = axis.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not (equals and key and all(values)):
            raise UserError(f"--grid {axis}: expected key=A,B,..., such as optim.lr=1e-5,3e-5")
        if key in parsed:
            raise UserError(f"--grid: {key} comes twice; give all of its values at once")
        if key == "run_dir":
            raise UserError("--grid: every cell has a folder of its own below run_dir already")
        if len(set(values)) < len(values):
            raise UserError(f"--grid {axis}: a value comes twice")
        parsed[key] = values
    return parsed


def plan_cells(path: str, overrides: Sequence[str], axes: dict[str, list[str]]) -> list[Cell]:
    """Loads the config of every cell, so that a mistake in the last one is told before the first runs.

    Raises:
        UserError: A config is wrong.
    """
    root = load_finetune_config(path, overrides).run_dir
    cells = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        settings = [f"{key}={value}" for key, value in values.items()]
        named = [s for s in settings if len(axes[s.partition("=")[0]]) > 1] or settings
        folder = str(Path(root) / ",".join(named).replace("/", "_"))
        config = load_finetune_config(
            path, [*overrides, *settings, f"run_dir={json.dumps(folder)}"]
        )
        cells.append(Cell(values, config))
    return cells


def run_grid(path: str, overrides: Sequence[str], axes: Sequence[str]) -> int:
    """Runs all cells that are not finished and writes `grid.json` and `grid.csv` into run_dir.

    Returns:
        0 when every cell is done, 1 when some ended with a loss that is no number, 3 when stopped.

    Raises:
        UserError: A config is wrong, or a run cannot begin.
    """
    cells = plan_cells(path, overrides, parse_axes(axes))
    main_rank = os.environ.get("RANK", "0") == "0"
    worst = EXIT_DONE
    for number, cell in enumerate(cells, 1):
        if main_rank:
            print(f"--- {number} of {len(cells)}: {Path(cell.config.run_dir).name}", flush=True)
        code = run(cell.config)
        gc.collect()  # a trainer refers to itself: its model would stay beside the next one
        if main_rank:
            _write_table(cells)
        if code == EXIT_SAVED:
            return EXIT_SAVED
        worst = max(worst, EXIT_FAILED if code else EXIT_DONE)
    if main_rank:
        root = Path(cells[0].config.run_dir).parent
        print(f"{root / 'grid.csv'} and grid.json written", flush=True)
    return worst


def cell_row(cell: Cell) -> dict[str, Any]:
    """What is known of a cell now: its values, its state and its last loss."""
    run_dir = Path(cell.config.run_dir)
    mark, metrics = run_dir / HF_FOLDER / MARK, run_dir / "metrics.jsonl"
    row: dict[str, Any] = {**cell.values, **dict.fromkeys(_RESULTS), "folder": str(run_dir)}
    if mark.is_file():
        record = json.loads(mark.read_text(encoding="utf-8"))
        row |= {
            "state": "done",
            "steps": record["steps"],
            "final_loss": record["final"].get("loss"),
        }
    elif metrics.is_file():
        row["state"] = "unfinished"
    else:
        row["state"] = "not begun"
    return row


def _write_table(cells: list[Cell]) -> None:
    root = Path(cells[0].config.run_dir).parent
    rows = [cell_row(cell) for cell in cells]
    write_whole(root / "grid.json", json.dumps(rows, indent=2) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(root / "grid.csv", text.getvalue())
