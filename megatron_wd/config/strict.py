"""Plain values checked against dataclasses: known keys, exact types, nothing missing.

OmegaConf converts where it can ("3" becomes 3, "yes" becomes true). A config that means something
else than it says is what this room must not let through, so values are checked here before
OmegaConf has them. Only an integer where a float is expected is taken as it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import MISSING

Path = tuple[str, ...]
Problem = tuple[Path, str]

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def find_problems(value: Any, kind: Any, *, references: bool = True) -> list[Problem]:
    """Compares a value with a type.

    Args:
        value: Plain dicts, lists and scalars.
        kind: A dataclass, `list[X]`, `dict[str, X]`, `Literal[...]`, `X | None` or a scalar type.
        references: Whether text with `${...}` passes everywhere, because it is not resolved yet.

    Returns:
        Path and message of everything that is wrong.
    """
    names = list(_field_paths(kind)) if dataclasses.is_dataclass(kind) else []
    return list(_problems(value, kind, (), _Context(references, names)))


def find_missing(value: Any, kind: Any, path: Path = ()) -> list[Path]:
    """Lists the required fields that `value`, which passed find_problems, leaves out."""
    kind, _ = _without_none(kind)
    if typing.get_origin(kind) is list and isinstance(value, list):
        (item,) = typing.get_args(kind)
        return [p for i, v in enumerate(value) for p in find_missing(v, item, (*path, str(i)))]
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return [p for k, v in value.items() for p in find_missing(v, item, (*path, k))]
    if not dataclasses.is_dataclass(kind):
        return [path] if value == MISSING else []
    if not isinstance(value, dict):
        return []
    missing = []
    for name, hint, default in fields_of(kind):
        if name in value:
            missing += find_missing(value[name], hint, (*path, name))
        elif default == MISSING:
            missing.append((*path, name))
        elif dataclasses.is_dataclass(hint):
            missing += find_missing({}, hint, (*path, name))
    return missing


def fields_of(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, type and default of every field of a dataclass."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, hints[field.name], MISSING if default is dataclasses.MISSING else default


@dataclasses.dataclass(frozen=True)
class _Context:
    references: bool
    all_paths: list[Path]


def _problems(value: Any, kind: Any, path: Path, context: _Context) -> Iterator[Problem]:
    kind, optional = _without_none(kind)
    if isinstance(value, str) and (value == MISSING or (context.references and "${" in value)):
        return
    if value is None and optional:
        return
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        yield from _section_problems(value, kind, path, context)
    elif origin is list:
        if not isinstance(value, list):
            yield path, f"expected a list, got {_describe(value)}"
            return
        (item,) = typing.get_args(kind)
        for index, element in enumerate(value):
            yield from _problems(element, item, (*path, str(index)), context)
    elif origin is dict:
        if not isinstance(value, dict):
            yield path, f"expected a section of keys, got {_describe(value)}"
            return
        item = typing.get_args(kind)[1]
        for key, element in value.items():
            yield from _problems(element, item, (*path, key), context)
    elif origin is typing.Literal:
        choices = typing.get_args(kind)
        if not any(value == c and type(value) is type(c) for c in choices):
            listed = ", ".join(str(c) for c in choices)
            yield path, f"got {_describe(value)}; choose one of: {listed}{_suggest(value, choices)}"
    else:
        message = _scalar_problem(value, kind)
        if message:
            yield (
                path,
                message + (" or null" if optional and message.startswith("expected") else ""),
            )


def _section_problems(value: Any, kind: Any, path: Path, context: _Context) -> Iterator[Problem]:
    if not isinstance(value, dict):
        keys = ", ".join(name for name, _, _ in fields_of(kind))
        yield path, f"expected a section with keys ({keys}), got {_describe(value)}"
        return
    hints = {name: hint for name, hint, _ in fields_of(kind)}
    for key, element in value.items():
        if key in hints:
            yield from _problems(element, hints[key], (*path, key), context)
        else:
            yield (*path, key), f"unknown key{_nearest(key, path, list(hints), context)}"


def _scalar_problem(value: Any, kind: Any) -> str | None:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return None if math.isfinite(value) else f"expected a finite number, got {value}"
    if kind is not float and type(value) is kind:
        return None
    hint = ""
    if kind is int and isinstance(value, float) and value.is_integer():
        hint = f"; write {int(value):_}"
    elif kind is str and not isinstance(value, dict | list) and value is not None:
        hint = f'; write "{value}" in quotes if that is meant'
    elif isinstance(value, str) and kind is not str:
        hint = "; write it without quotes" if _looks_like(value, kind) else ""
    return f"expected {_NAMES.get(kind, str(kind))}, got {_describe(value)}{hint}"


def _looks_like(text: str, kind: Any) -> bool:
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float}
    try:
        return kind in readers and readers[kind](text) is not None
    except ValueError:
        return False


def _nearest(key: str, path: Path, siblings: list[str], context: _Context) -> str:
    close = difflib.get_close_matches(key, siblings, n=1)
    if close:
        return f"; did you mean {'.'.join((*path, close[0]))}?"
    elsewhere = [p for p in context.all_paths if p[-1] == key]
    if not elsewhere:
        leaves = {p[-1] for p in context.all_paths}
        elsewhere = [
            p
            for name in difflib.get_close_matches(key, leaves, n=1, cutoff=0.75)
            for p in context.all_paths
            if p[-1] == name
        ]
    if elsewhere:
        return f"; did you mean {' or '.join('.'.join(p) for p in elsewhere)}?"
    return f"; the keys here are: {', '.join(siblings)}"


def _field_paths(kind: Any, path: Path = ()) -> Iterator[Path]:
    for name, hint, _ in fields_of(kind):
        yield (*path, name)
        if dataclasses.is_dataclass(hint):
            yield from _field_paths(hint, (*path, name))


def _without_none(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not type(None)]
        assert len(rest) == 1, f"a field has one type or null, not {kind}"
        return rest[0], True
    return kind, False


def _suggest(value: Any, choices: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the text {value!r}"
    return str(value)
