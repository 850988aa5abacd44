"""From YAML files and `key.path=value` overrides to dataclasses, through OmegaConf.

A file may build on others (`base: other.yaml`, or a list, relative to the file that names it): they
are merged in order, the file itself over them, overrides over all. Sections merge key by key, lists
are replaced. `${section.key}` refers to another value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_wd.config.errors import UserError
from megatron_wd.config.schema import Config
from megatron_wd.config.source import parse_scalar, parse_yaml
from megatron_wd.config.strict import fields_of, find_missing, find_problems
from megatron_wd.config.validate import validate

KeyPath = tuple[str, ...]


@dataclass
class _Layer:
    """Values with the place where each was written ("file:line" or "command line")."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath, default: str) -> str:
        """Names where `path`, or else the nearest section above it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return default


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Reads and validates the config of a training run.

    Args:
        path: YAML file.
        overrides: `key.path=value` each, the value as YAML would have it.

    Returns:
        The config, with every check passed that needs neither torch nor the data.

    Raises:
        UserError: Naming file, line, key and remedy.
    """
    config = load_structured(Config, path, overrides)
    try:
        validate(config)
    except UserError as error:
        raise UserError(f"{os.fspath(path)}: {error}") from None
    return config


def load_structured[T](
    schema: type[T], path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> T:
    """Reads a YAML file into any dataclass as strictly as `load_config` does for `Config`.

    Args:
        schema: Dataclass, possibly of dataclasses.
        path: YAML file.
        overrides: `key.path=value` each.

    Returns:
        An instance of `schema`; checks between fields are the caller's.

    Raises:
        UserError: Naming file, line, key and remedy.
    """
    try:
        return _load_structured(schema, path, overrides)
    except UserError:
        raise
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        # Numbers of thousands of digits, thousands of nested lists, bytes that YAML knows no way to read.
        raise UserError(
            f"{os.fspath(path)}: a value in it or on the command line cannot be read: "
            f"{_first_line(error)}"
        ) from None


def _load_structured[T](
    schema: type[T], path: str | os.PathLike[str], overrides: Sequence[str]
) -> T:
    name = os.fspath(path)
    layer = _read_file(Path(path), schema, ())
    for override in overrides:
        _apply_override(layer, override, schema)
    missing = find_missing(layer.data, schema)
    if missing:
        listed = ", ".join(".".join(p) for p in missing)
        count = (
            "a required value is" if len(missing) == 1 else f"{len(missing)} required values are"
        )
        raise UserError(f"{name}: {count} not set: {listed}; set in the file or as key=value")
    plain = _resolve_references(layer, schema, name)
    _raise_problems(find_problems(plain, schema, references=False), layer, name)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{name}: {_first_line(error)}") from None
    assert isinstance(result, schema)
    return result


def _read_file(path: Path, schema: type, parents: tuple[Path, ...]) -> _Layer:
    """Reads one file and the files it builds on."""
    name = str(path)
    identity = path.resolve()
    if identity in parents:
        chain = " -> ".join(str(p) for p in (*parents[parents.index(identity) :], identity))
        raise UserError(f"{name}: base files build on each other in a circle: {chain}")
    value, lines = parse_yaml(_read_text(path), name)
    if value is None:
        raise UserError(f"{name}: the file is empty")
    if not isinstance(value, dict):
        raise UserError(f"{name}: expected keys and values, such as `seed: 1234`, at the top level")
    own = _Layer(value, {p: f"{name}:{line}" for p, line in lines.items()})
    merged = _Layer()
    for base in _base_files(own, name):
        base_path = path.parent / base
        if not base_path.is_file():
            raise UserError(f"{own.place(('base',), name)}: base: there is no file {base_path}")
        _merge(merged, _read_file(base_path, schema, (*parents, identity)))
    own.data.pop("base", None)
    _raise_problems(find_problems(own.data, schema), own, name)
    _refuse_resolvers(own.data, (), own, name)
    _merge(merged, own)
    return merged


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such config file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a YAML file in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; name a YAML file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _base_files(layer: _Layer, name: str) -> list[str]:
    base = layer.data.get("base")
    if base is None and "base" not in layer.data:
        return []
    named = base if isinstance(base, list) else [base]
    files = [file for file in named if isinstance(file, str) and file]
    if not files or len(files) < len(named):
        place = layer.place(("base",), name)
        raise UserError(f"{place}: base: expected a path or a list of paths, got {base!r}")
    return files


def _apply_override(layer: _Layer, text: str, schema: type) -> None:
    """Writes one `key.path=value` into the layer."""
    key, equals, raw = text.partition("=")
    place = f"command line: {text}"
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"{place}: expected key.path=value, such as optim.lr=3e-4")
    if raw.strip() == "":
        raise UserError(
            f"{place}: no value; write {key}=null to unset it, or {key}='\"\"' for empty text"
        )
    raw = raw.strip()
    value = parse_yaml(raw, place)[0] if raw[0] in "[{\"'" else parse_scalar(raw)
    nested = _nest(path, value, layer.data)
    own = _Layer(nested, {path: place, path[:1]: place})
    _raise_problems(find_problems(nested, schema), own, place, bare=True)
    _refuse_resolvers(nested, (), own, place)
    own.places = {path: place}
    _merge(layer, own)


def _nest(path: KeyPath, value: Any, current: Any) -> Any:
    """Builds the nested value that sets `path`; an index into a list replaces that element."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(current, list) and head.isdecimal() and int(head) < len(current):
        changed = list(current)
        old = changed[int(head)]
        new = _nest(rest, value, old)
        both = isinstance(old, dict) and isinstance(new, dict)
        changed[int(head)] = {**old, **new} if both else new
        return changed
    below = current.get(head) if isinstance(current, dict) else None
    return {head: _nest(rest, value, below)}


def _merge(into: _Layer, layer: _Layer) -> None:
    """Merges `layer` over `into`: sections key by key, everything else replaced."""
    into.data = _merged(into.data, layer.data)
    into.places.update(layer.places)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{k: _merged(old[k], v) if k in old else v for k, v in new.items()}}
    return new


def _refuse_resolvers(value: Any, path: KeyPath, layer: _Layer, name: str) -> None:
    """Refuses `${name:...}`: a config must not depend on the environment it is read in."""
    if isinstance(value, dict):
        for key, child in value.items():
            _refuse_resolvers(child, (*path, key), layer, name)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_resolvers(child, (*path, str(index)), layer, name)
    elif isinstance(value, str) and re.search(r"\$\{[^}]*:", value):
        raise UserError(
            f"{layer.place(path, name)}: {'.'.join(path)}: {value!r} calls a resolver; "
            "only references to other values, such as ${optim.lr}, are allowed"
        )


def _resolve_references(layer: _Layer, schema: type, name: str) -> dict[str, Any]:
    """Replaces `${...}` by the values they name, without converting types."""
    try:
        defaults = OmegaConf.to_container(OmegaConf.structured(schema))
        merged = OmegaConf.create(_merged(defaults, layer.data))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        path = tuple(str(getattr(error, "full_key", None) or "").split("."))
        message = f"{_first_line(error)}; name an existing value by its full path"
        raise UserError(f"{layer.place(path, name)}: {'.'.join(path)}: {message}") from None
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def _raise_problems(
    problems: list[tuple[KeyPath, str]], layer: _Layer, name: str, *, bare: bool = False
) -> None:
    """Raises one error with all problems, one a line."""
    if not problems:
        return
    lines = []
    for path, message in problems:
        place = name if bare else layer.place(path, name)
        lines.append(f"{place}: {'.'.join(path)}: {message}")
    raise UserError("\n".join(lines))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def resolved_yaml(config: Any, *, mark_changes: bool = False) -> str:
    """Writes a config as YAML that loads back to the same config.

    Args:
        config: `Config` or another dataclass read by `load_structured`.
        mark_changes: Whether a comment names the default where a value differs from it.

    Returns:
        YAML text with every field in the order of the dataclass.
    """
    text = OmegaConf.to_yaml(OmegaConf.structured(config))
    if not mark_changes:
        return text
    _, numbers = parse_yaml(text, "config")
    lines = text.splitlines()
    for path, (default, _) in diff_from_defaults(config).items():
        note = "required" if default == MISSING else f"default: {_short(default)}"
        index = numbers[tuple(path.split("."))] - 1
        lines[index] += f"  # {note}"
    return "\n".join(lines) + "\n"


def diff_from_defaults(config: Any) -> dict[str, tuple[Any, Any]]:
    """Lists what a config sets otherwise than its dataclass does.

    Returns:
        For each dotted path the default and the value; the default of a required field is "???".
        Lists count as one value.
    """
    differences: dict[str, tuple[Any, Any]] = {}
    for name, _, default in fields_of(type(config)):
        value = getattr(config, name)
        if hasattr(value, "__dataclass_fields__"):
            for path, pair in diff_from_defaults(value).items():
                differences[f"{name}.{path}"] = pair
        elif value != default:
            differences[name] = (default, value)
    return differences


def _short(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
