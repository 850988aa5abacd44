"""Reads the rows of a task: JSON Lines, Parquet, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.data.inputs import HubDataset, InputFile, find_inputs

Row = tuple[str, dict[str, Any]]  # where it stands, for messages; its fields


def read_rows(source: Sequence[str], fields: set[str]) -> Iterator[Row]:
    """Yields the rows of all inputs, in order.

    Args:
        source: As `TaskConfig.source`.
        fields: Names of the fields that must be there.

    Raises:
        UserError: Something cannot be read, or a field is missing.
    """
    try:
        inputs = find_inputs(source)
    except UserError as error:
        raise UserError(str(error).replace("--input", "task.source:", 1)) from None
    if isinstance(inputs, HubDataset):
        yield from _hub_rows(inputs, fields)
        return
    for file in inputs:
        if file.format == "parquet":
            yield from _parquet_rows(file, fields)
        elif file.format == "jsonl":
            yield from _json_rows(file, fields)
        else:
            raise UserError(
                f"task.source: {file.path} is plain text, which has no fields; give JSON Lines or Parquet."
            )


def _check_fields(place: str, present: Sequence[str], fields: set[str]) -> None:
    missing = sorted(fields - set(present))
    if missing:
        raise UserError(
            f"{place}: no field {', '.join(missing)}, which the task's templates use; it has "
            f"{', '.join(present) or 'none'}. Set task.prompt, task.response and task.keep_if to fields "
            "that exist."
        )


def _json_rows(file: InputFile, fields: set[str]) -> Iterator[Row]:
    from megatron_wd.data.readers import is_compressed, open_compressed

    opened: Any = open_compressed(file.path)[0] if is_compressed(file.path) else None
    with opened or open(file.path, "rb") as stream:
        for place, row in _json_values(file.path, stream):
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise UserError(f"{place}: expected an object with fields, got {kind}.")
            _check_fields(place, list(row), fields)
            yield place, row


def _json_values(path: str, stream: Any) -> Iterator[tuple[str, Any]]:
    """The values of a file with one on each line, or with one list of them over the whole file."""
    place = path
    try:
        for number, line in enumerate(stream, 1):
            place = f"{path}:{number}"
            if number == 1 and line.lstrip().startswith(b"["):
                place = path
                values = json.loads(line + stream.read())
                yield from ((f"{path}: item {index}", value) for index, value in enumerate(values))
            elif line.strip():
                yield place, json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: is no JSON: {error}.") from None


def _parquet_rows(file: InputFile, fields: set[str]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        _check_fields(file.path, table.schema_arrow.names, fields)
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=sorted(fields)):
            for row in batch.to_pylist():
                yield f"{file.path}: row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file.path}: cannot be read as Parquet: {reason}.") from None


def _hub_rows(source: HubDataset, fields: set[str]) -> Iterator[Row]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    name = ":".join(filter(None, (source.name, source.config, source.split)))
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # the library raises many kinds, from many libraries
        reason = (str(error).strip().splitlines() or [repr(error)])[0].rstrip(".")
        raise UserError(
            f"task.source: dataset {name} cannot be loaded: {reason}.\nWithout a network, bring its "
            f"rows as JSON Lines or Parquet with the fields {', '.join(sorted(fields))} and name the "
            "files: 'task.source=[FILE.parquet]'."
        ) from None
    _check_fields(f"dataset {name}", rows.column_names, fields)
    for number, row in enumerate(rows.select_columns(sorted(fields))):
        yield f"dataset {name}: row {number}", dict(row)
