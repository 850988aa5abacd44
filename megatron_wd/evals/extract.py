r"""Finds the answer in what a model wrote.

A candidate is looked for in this order: the last `\boxed{}`; what follows the last "answer is"; what
follows the last "Answer:"; what follows the last "####". What is read out of it depends on the kind of
answer: `math` takes the whole expression, `letter` a choice, `word` one of a few labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Kind = Literal["math", "letter", "word"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ANSWER_IS = re.compile(r"\banswers?\s*(?:is|are)\b", re.IGNORECASE)
_ANSWER_COLON = re.compile(r"\banswer\s*(?:\*\*)?\s*[:=]", re.IGNORECASE)
_HASHES = re.compile(r"####")
# A sentence ends at a full stop before white space; "3.5" and "e.g. x" inside an answer stay whole.
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bNo)\.(?:\*\*)?\s+(?=[A-Z\\(])|\n")
_DRESS = re.compile(r"^(?:[\s*_`\"“”']|\\\(|\\\[|\$\$?)+|(?:[\s*_`\"“”'.,;?]|\\\)|\\\]|\$\$?)+$")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|rm|bf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(
    r"^(?:(?:option|choice|letter|answer)\s*:?\s*)?[(\[]?\s*([A-Za-z])\s*(?=[)\].:,;!?]|\s|$)",
    re.IGNORECASE,
)
_WHOLE_CHOICE = re.compile(r"^\W*([A-Z])(?:\W*$|[).:]\s)")
_SECOND_CHOICE = re.compile(r"^[)\].,]?\s*(?:and|or|&|,|/)\s*\(?([A-Z])\b(?!\s+[a-z])")


def extract(text: str, kind: Kind, labels: Sequence[str] = ()) -> str | None:
    """Reads the answer out of a response.

    Args:
        text: The response, without its prompt.
        kind: What the answer is: an expression, the letter of a choice, or one of the labels.
        labels: The letters, or the words, that can be meant; for `letter`, none means A to Z.

    Returns:
        The answer; letters in upper case, words in lower case; None if there is none to be read.
    """
    for candidate in candidates(text):
        answer = _readers[kind](candidate, labels)
        if answer is not None:
            return answer
    return _bare(text, kind, labels)


def candidates(text: str) -> Iterator[str]:
    """Yields what may hold the answer, the most explicit form first; never an empty text."""
    boxed = last_boxed(text)
    if boxed:
        yield boxed
    for marker in (_ANSWER_IS, _ANSWER_COLON, _HASHES):
        found = _after_last(marker, text)
        if found:
            yield found


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces are closed and which is not empty.

    Of boxes in boxes it is the innermost of the last one. `\boxed 5` without braces counts too.
    """
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        if not rest.startswith("{"):
            word = re.match(r"[^\s$.,\\{}]+", rest)
            content = word.group() if word else None
        else:
            content = _braced(rest)
        if content is not None and content.strip():
            return content.strip()
    return None


def _braced(text: str) -> str | None:
    """What stands between the brace that opens `text` and the one that closes it."""
    depth = 0
    escaped = False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:position]
    return None


def _after_last(marker: re.Pattern[str], text: str) -> str | None:
    """The rest of the sentence after the last match of `marker`, without dressing."""
    for match in reversed(list(marker.finditer(text))):
        rest = text[match.end() :].lstrip().lstrip(":=").strip("* \t\n")
        # "answer is as follows: 5"; the colon of a ratio or of a time has a digit before it.
        before, colon, after = rest.partition(":")
        if colon and after.strip() and not re.search(r"[\d\n$\\]", before) and " " in before:
            rest = after.strip()
        # Enthusiasm, not a factorial: that is written in a box.
        found = undress(undress(_SENTENCE_END.split(rest, maxsplit=1)[0]).rstrip("!"))
        if found:
            return found
    return None


def undress(text: str) -> str:
    """Takes off what only surrounds an answer: quotes, emphasis, maths delimiters, final stops."""
    previous = None
    while previous != text:
        previous, text = text, _DRESS.sub("", text)
    return text


def _expression(candidate: str, labels: Sequence[str]) -> str | None:
    return undress(candidate) or None


def _choice(candidate: str, labels: Sequence[str]) -> str | None:
    plain = undress(_LATEX_TEXT.sub(r"\1", candidate))
    match = _CHOICE.match(plain)
    if not match:
        return None
    letter, rest = match.group(1), plain[match.end() :]
    # "a" and "I" are words too: a small letter, and any before a small word, must stand alone.
    if letter.islower() and re.match(r"\s*[A-Za-z]", rest):
        return None
    if _SECOND_CHOICE.match(rest):
        return None
    return _known(letter.upper(), labels)


def _word(candidate: str, labels: Sequence[str]) -> str | None:
    words = re.findall(r"[^\s.,;:!?*_\"'()\[\]{}$]+", _LATEX_TEXT.sub(r"\1", candidate))
    return _known(words[0].lower(), [x.lower() for x in labels]) if words else None


def _known(answer: str, labels: Sequence[str]) -> str | None:
    return answer if not labels or answer in labels else None


def _bare(text: str, kind: Kind, labels: Sequence[str]) -> str | None:
    """An answer without any announcement: a response that is nothing but a letter or a label."""
    if kind == "letter":
        match = _WHOLE_CHOICE.match(_LATEX_TEXT.sub(r"\1", text))
        return _known(match.group(1), labels) if match else None
    if kind == "word" and labels and len(text.split()) == 1:
        return _word(text, labels)
    return None


_readers: dict[str, Callable[[str, Sequence[str]], str | None]] = {
    "math": _expression,
    "letter": _choice,
    "word": _word,
}
