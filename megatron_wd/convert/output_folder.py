"""A folder that appears under its name when all of it is written, and replaces only its own kind."""

from __future__ import annotations

import glob
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_wd.config import UserError

_PORTION_BYTES = 2**20


def check_target(target: Path, force: bool, mark: str) -> None:
    """Checks that writing a folder loses nothing.

    Args:
        target: The folder.
        force: Whether an earlier result in it may be replaced.
        mark: Name of the JSON file in which such a result lists its "files".

    Raises:
        UserError: If it holds something else, or an earlier result without `force`.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file; give a folder that does not exist yet.")
    if not force:
        raise UserError(
            f"{target} exists and is not empty; give another folder, or --force to replace an "
            f"earlier export."
        )
    _refuse_foreign(target, mark)


def files_of(folder: Path, mark: str) -> list[str]:
    """Returns what the mark lists: every file and folder in `folder`, and the mark itself."""
    return sorted({*(path.name for path in folder.iterdir()), mark})


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Writes all of `data`, in small portions: tens of megabytes at once take Linux ten times as long."""
    while data:
        data = data[file.write(data[:_PORTION_BYTES]) :]


def _refuse_foreign(folder: Path, mark: str) -> None:
    try:
        content = json.loads((folder / mark).read_text(encoding="utf-8"))
        files = set(content["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} does not look like an export (no {mark} in it that lists its files), so "
            f"--force does not replace it. Give another folder, or remove this one yourself."
        ) from None
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if foreign:
        raise UserError(
            f"{folder} holds {foreign[0]}, which no export wrote, so --force does not replace it. "
            f"Move that file, or give another folder."
        )


@contextmanager
def appears_when_done(target: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """Gives a temporary folder beside `target`, which becomes it at the end, or vanishes.

    Raises:
        UserError: If the disk is too full, or refuses.
    """
    target = target.absolute()
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise UserError(
                f"{target.parent} has {free / 1e9:.2f} GB free, but the result takes "
                f"{needed_bytes / 1e9:.2f} GB."
            )
        _remove_leftovers(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        if force and target.exists():
            replaced = target.parent / f".{target.name}.replaced-{os.getpid()}"
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Removes what killed processes have left beside a folder that they were writing."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*-*"):
        kind, _, pid = left.name.removeprefix(f".{target.name}.").partition("-")
        # What was to be replaced is the result itself as long as nothing has taken its place.
        stale = kind == "partial" or (kind == "replaced" and target.exists())
        if stale and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
