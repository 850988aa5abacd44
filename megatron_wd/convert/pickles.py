"""Reads pickles of strangers as inert records: whatever they ask for, nothing is executed.

`torch.save` writes a zip archive with a pickle in it. What is wanted from one of a stranger (the
arguments of a run, the index of a checkpoint) is plain data among objects of all kinds; those
become records that remember their class, their arguments and their state, and can do nothing.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Hashable, Iterable
from typing import IO, Any

_LOCAL_HEADER_BYTES = 30


class Record:
    """What an object of a pickle becomes: its arguments and its state, and no behaviour."""

    def __init__(self, *args: Any, **_: Any):
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Takes an element of a list-like object; what it is does not matter here."""

    def extend(self, values: Iterable[Any]) -> None:
        """As `append`."""

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the pickled object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def record_class(name: str) -> type[Record]:
    """A class of its own each time: whatever a pickle does to it stays in that pickle."""
    return type(name, (Record,), {})


class InertUnpickler(pickle.Unpickler):
    """An unpickler in which every name is a record, but for those that `find` knows.

    Args:
        file: The pickle.
        find: Returns what a module's name stands for, or None for a record.
    """

    def __init__(self, file: IO[bytes], find: Callable[[str, str], Any] | None = None):
        super().__init__(file)
        self._find = find

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What a name in the pickle stands for."""
        known = self._find(module_name, global_name) if self._find is not None else None
        return record_class(global_name) if known is None else known

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's values, which are not wanted."""
        return Record(pid)


def read_archive(file: IO[bytes]) -> Any:
    """Returns the object of a `torch.save` archive; whatever is no plain data is a `Record`.

    Raises:
        Exception: Of any kind at all, where the file is damaged.
    """
    start, length = stored_records(file)["data.pkl"]
    file.seek(start)
    return InertUnpickler(io.BytesIO(file.read(length))).load()


def stored_records(file: IO[bytes]) -> dict[str, tuple[int, int]]:
    """Finds the records of a `torch.save` archive: name without the first folder -> start, length.

    Their checksums are not looked at: torch does not look at them either, and may leave them out.

    Raises:
        Exception: Of any kind at all, where the file is damaged.
    """
    records = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} in it is compressed")
            file.seek(entry.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
            if header[:4] != b"PK\x03\x04":
                raise ValueError("a header in it is damaged")
            # The lengths of name and padding, which stand between the header and the values.
            skipped = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            start = entry.header_offset + len(header) + skipped
            records[entry.filename.partition("/")[2]] = (start, entry.file_size)
    return records
