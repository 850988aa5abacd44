r"""Whether two answers mean the same: as text, or as mathematics through math-verify.

math-verify reads LaTeX and compares with sympy, in both directions and with a time limit. What it reads
otherwise than a reader would is written in its notation first: minus signs and powers of ten of other
notations, thousands grouped with spaces, mixed numbers, units in words. Words are compared as words: as
products of letters, which is how they parse, "listen" would equal "silent".
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, Literal

from megatron_wd.evals.extract import undress

Kind = Literal["math", "text"]

TIMEOUT_S = 4
_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/",
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "√": r"\sqrt ",
        "º": "°", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "％": "%",
    }
)  # fmt: skip
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that are mathematics; everything else that only has letters is a word.
_FUNCTIONS = "pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|infty|inf|infinity|oo|emptyset|varnothing"
_NUMBER = r"[-+]?\\?[$€£¥]?\s*[-+]?(?:\d[\d,]*\.?\d*|\.\d+)"
_UNITS = re.compile(
    rf"^(?P<number>{_NUMBER}|{_NUMBER}\s*/\s*\d+)\s*(?P<words>(?!(?:{_FUNCTIONS})\b)"
    r"[A-Za-z]{2,}(?:[\s/.-]+(?:[A-Za-z]+|\d(?!\d)))*\.?(?:\s*\^?\{?[23²³]\}?)?)$"
)
_WORDS = re.compile(rf"^(?!(?:{_FUNCTIONS})$)[A-Za-z][A-Za-z'’-]+(?:[\s,]+[A-Za-z'’-]+)*$")
_BASE = re.compile(r"_\{?(\d+)\}?$")


def equivalent(gold: str, answer: str, kind: Kind, *, timeout_s: int = TIMEOUT_S) -> bool:
    """Compares an answer with the right one.

    Args:
        gold: The right answer.
        answer: The one to judge.
        kind: `text` ignores case, spacing and a final full stop; `math` compares values.
        timeout_s: Longest time for a comparison; one that takes longer counts as different.

    Returns:
        Whether they mean the same. A percentage equals both its number and its share: 50 % is 50 and 0.5.
    """
    if _plain(gold) == _plain(answer):
        return True
    if kind == "text":
        return False
    left, right = normalize(gold), normalize(answer)
    if left == right:
        return True
    if _WORDS.match(left) or _WORDS.match(right):
        return _plain(left) == _plain(right)
    bases = [m.group(1) for m in map(_BASE.search, (left, right)) if m]
    if len(bases) == 2 and bases[0] != bases[1]:
        return False
    return _same_value(left, right, timeout_s)


def normalize(answer: str) -> str:
    """Writes an expression in the notation that math-verify reads as it is meant."""
    text = undress(answer.translate(_SIGNS))
    text = re.sub(r"^\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}$", r"\1", text).strip()
    text = re.sub(r"^\\?\((\w+)\\?\)$", r"\1", text)
    # 1 000, 1\,000, 1{,}000 -> 1000; not the mixed number 7 100/3.
    text = re.sub(r"(?<=\d)(?:\\[,!; ]|\{,\}| )(?=\d{3}(?![\d/]))", "", text)
    text = re.sub(r"(\d\.?)[eE]([-+]?\d+)\b", r"\1\\times 10^{\2}", text)
    text = re.sub(r"^([-+]?\d+)\s+(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}", text)
    units = _UNITS.match(text)
    if units:
        power = _SCALES.get(units["words"].split()[0].lower())
        text = units["number"].strip() + (rf"\times 10^{{{power}}}" if power else "")
    return re.sub(r"(?<!\\)\$|\\\$|[€£¥]", "", text).strip()


def _same_value(left: str, right: str, timeout_s: int) -> bool:
    """Whether math-verify finds either equal to the other, or equal once a percent sign is gone."""
    pairs = [(left, right)]
    if ("%" in left) != ("%" in right):
        pairs.append((_without_percent(left), _without_percent(right)))
        pairs.append((_as_share(left), _as_share(right)))
    return any(_verify(a, b, timeout_s) or _verify(b, a, timeout_s) for a, b in pairs)


def _without_percent(text: str) -> str:
    return re.sub(r"\s*\\?%", "", text)


def _as_share(text: str) -> str:
    return rf"\frac{{{_without_percent(text)}}}{{100}}" if "%" in text else text


def _verify(gold: str, answer: str, timeout_s: int) -> bool:
    from math_verify import verify

    left, right = _parse(gold, timeout_s), _parse(answer, timeout_s)
    if not left or not right:
        return False
    return bool(verify(left, right, timeout_seconds=timeout_s))


@lru_cache(maxsize=4096)
def _parse(text: str, timeout_s: int) -> Any:
    from math_verify import parse

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it prints what it cannot read
    return parse(f"${text}$", parsing_timeout=timeout_s)


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
