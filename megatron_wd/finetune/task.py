"""From the rows of a task to prompts and responses, through its Jinja templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.finetune.records import read_rows
from megatron_wd.finetune.schema import TaskConfig


@dataclass(frozen=True)
class Example:
    """One prompt and the response to learn, and where they come from, for messages."""

    place: str
    prompt: str
    response: str


@dataclass
class RowCounts:
    """What became of the rows of a source."""

    rows: int = 0
    kept: int = 0


def read_examples(task: TaskConfig, counts: RowCounts) -> Iterator[Example]:
    """Yields the examples of a task.

    Args:
        task: Source and templates.
        counts: Filled in while rows are read.

    Raises:
        UserError: A template is wrong, a field is missing, or a row does not fit.
    """
    templates = _Templates(task)
    for place, row in read_rows(task.source, templates.fields):
        counts.rows += 1
        if not templates.keeps(place, row):
            continue
        counts.kept += 1
        yield templates.example(place, row)
        if counts.kept == task.max_samples:
            return


def count_warnings(task: TaskConfig, counts: RowCounts) -> list[str]:
    """Says where the counts differ from those that the task is known to have."""
    if task.max_samples is not None:
        return []
    compared = (
        ("rows", task.expect_rows, counts.rows),
        ("samples", task.expect_samples, counts.kept),
    )
    return [
        f"task {task.name}: {found:,} {what}, where {expected:,} are expected: another version of the data?"
        for what, expected, found in compared
        if expected is not None and expected != found
    ]


class _Templates:
    """The compiled templates of a task.

    Attributes:
        fields: Fields of a row that they use.
    """

    def __init__(self, task: TaskConfig) -> None:
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            finalize=lambda value: "" if value is None else value,
        )
        sources = {"prompt": task.prompt, "response": task.response}
        if task.keep_if is not None:
            sources["keep_if"] = "{{ " + task.keep_if + " }}"
        self.fields: set[str] = set()
        for name, source in sources.items():
            try:
                self.fields |= meta.find_undeclared_variables(self._environment.parse(source))
            except TemplateSyntaxError as error:
                raise UserError(f"task.{name} is no Jinja template: {error}: {source!r}") from None
        self._prompt = self._environment.from_string(task.prompt).render
        self._response = self._environment.from_string(task.response).render
        self._keep: Callable[..., Any] | None = None
        if task.keep_if is not None:
            expression = self._environment.compile_expression(task.keep_if, undefined_to_none=False)
            self._keep = lambda row: bool(expression(row))

    def keeps(self, place: str, row: dict[str, Any]) -> bool:
        """Whether the filter lets a row pass."""
        return self._keep is None or _evaluate("keep_if", self._keep, place, row)

    def example(self, place: str, row: dict[str, Any]) -> Example:
        """Renders one row."""
        prompt = _evaluate("prompt", self._prompt, place, row)
        return Example(place, prompt, _evaluate("response", self._response, place, row))


def _evaluate(name: str, function: Callable[..., Any], place: str, row: dict[str, Any]) -> Any:
    from jinja2 import TemplateError

    try:
        return function(row)
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
    ) as error:
        raise UserError(f"{place}: task.{name} cannot be filled in: {error}.") from None
