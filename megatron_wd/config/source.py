"""YAML read strictly, with the line of every key.

PyYAML follows YAML 1.1, where `yes` is true, `010` is eight, `1:30` is ninety and `1e-3` is text.
Here a plain scalar means what it means in YAML 1.2 and to the reader: true/false, decimal integers
(`20_000` too), floats (`1e-3` too), null; anything else is text. A key that occurs twice is an
error, since PyYAML would keep the last one silently.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from megatron_wd.config.errors import UserError

Path = tuple[str, ...]

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"

_FLOAT_PATTERN = r"[-+]?(?:(?:\d[\d_]*\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)"


class _Loader(yaml.SafeLoader):
    """Composes nodes whose plain scalars follow the module's rules."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # instead of the parent's, YAML 1.1


for _tag, _pattern in (
    (_NULL, r"(?:~|null|Null|NULL|)"),
    (_BOOL, r"(?:true|True|TRUE|false|False|FALSE)"),
    (_INT, r"[-+]?(?:0|[1-9][\d_]*)"),
    (_FLOAT, rf"(?:{_FLOAT_PATTERN}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), None)


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Parses one YAML document into plain Python values.

    Args:
        text: The document.
        name: What the messages call it, such as the path of its file.

    Returns:
        The value (dicts, lists, str, int, float, bool, None), and the line (from 1) of every key
        and list element by its path.

    Raises:
        UserError: Where it is no YAML, or a key occurs twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise UserError(_syntax_message(error, name)) from None
    finally:
        loader.dispose()
    lines: dict[Path, int] = {}
    value = None if node is None else _construct(node, (), name, lines, ())
    return value, lines


def parse_scalar(text: str) -> Any:
    """Parses the text of a plain scalar by the module's rules, so `1e-3` becomes a float."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    loader.dispose()
    return _scalar(tag, text)


def _syntax_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    place = f"{name}:{mark.line + 1}" if mark else name
    return f"{place}: not valid YAML: {problem}" + (f" ({context})" if context else "")


def _construct(
    node: yaml.Node, path: Path, name: str, lines: dict[Path, int], parents: tuple[int, ...]
) -> Any:
    line = node.start_mark.line + 1
    if id(node) in parents:
        raise UserError(f"{name}:{line}: an alias that contains itself")
    parents = (*parents, id(node))
    if isinstance(node, yaml.ScalarNode):
        if node.tag not in (_NULL, _BOOL, _INT, _FLOAT, _STR):
            raise UserError(
                f"{name}:{line}: the tag {node.tag!r} is not supported; write a plain value"
            )
        return _scalar(node.tag, node.value)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            lines[(*path, str(index))] = child.start_mark.line + 1
            items.append(_construct(child, (*path, str(index)), name, lines, parents))
        return items
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{name}:{key_line}: a key must be plain text")
        key = key_node.value
        child_path = (*path, key)
        if key in result:
            raise UserError(
                f"{name}:{key_line}: {'.'.join(child_path)} is set twice "
                f"(first on line {lines[child_path]}); keep one of the two"
            )
        lines[child_path] = key_line
        result[key] = _construct(child, child_path, name, lines, parents)
    return result


def _scalar(tag: str, text: str) -> Any:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        return int(text.replace("_", ""))
    if tag == _FLOAT:
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
