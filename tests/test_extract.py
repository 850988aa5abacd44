"""Answers in what models write, and when two of them mean the same: a table of hard cases."""

import pytest

from megatron_wd.evals.equivalence import equivalent
from megatron_wd.evals.extract import extract

# response, kind, answer (None: cannot be read)
RESPONSES = [
    (r"So \boxed{5}.", "math", "5"),
    (r"\boxed{\frac{1}{2}}", "math", r"\frac{1}{2}"),
    (r"\boxed{1} and then \boxed{2}", "math", "2"),
    (r"\boxed{\boxed{7}}", "math", "7"),
    (r"\boxed{x = \boxed{3}}", "math", "3"),
    (r"\boxed{\{1, 2\}}", "math", r"\{1, 2\}"),
    (r"\boxed{4} but wait, \boxed{\frac{1", "math", "4"),
    (r"\boxed{} The answer is 3.", "math", "3"),
    (r"\boxed 9", "math", "9"),
    (r"\fbox{12}", "math", "12"),
    (r"The answer is 8. Checking: \boxed{9}", "math", "9"),
    ("The answer is 4. No: the answer is 6.", "math", "6"),
    ("The answer is: 42", "math", "42"),
    ("The answer is 3.5.", "math", "3.5"),
    ("The final answer is 3. I hope it is correct.", "math", "3"),
    ("The answer is $\\frac{3}{4}$.", "math", r"\frac{3}{4}"),
    ("the answer is \\(x^2\\)", "math", "x^2"),
    ("The answer is as follows: 17", "math", "17"),
    ("The answer is 3:4.", "math", "3:4"),
    ("The answer is\n\n12\n\nbecause 3*4=12", "math", "12"),
    ("**Answer:** 15", "math", "15"),
    ("Answer: 1,234 apples\nDone", "math", "1,234 apples"),
    ("#### 1,000\nThe answer is: 1000", "math", "1000"),
    ("7*6=42\n#### 42", "math", "42"),
    ("The answers are 1 and 2", "math", "1 and 2"),
    ("The answer is", "math", None),
    ("It is 12.", "math", None),
    ("", "math", None),
    ("I have no answer, island 5", "math", None),
    ("The answer is (B) Paris.", "letter", "B"),
    ("The answer is B.", "letter", "B"),
    ("Answer: C.", "letter", "C"),
    ("Answer: c", "letter", "C"),
    ("The answer is option D because it fits.", "letter", "D"),
    ("The correct answer is **A**.", "letter", "A"),
    (r"\boxed{\text{C}}", "letter", "C"),
    (r"\boxed{(D)}", "letter", "D"),
    ("The answer is A because the sky is blue", "letter", "A"),
    ("The answer is a dog", "letter", None),
    ("The answer is Because", "letter", None),
    ("The answer is Dog. The answer is B", "letter", "B"),
    ("The answer is A and C", "letter", None),
    ("The answer is E", "letter", None),
    ("B", "letter", "B"),
    ("(C)", "letter", "C"),
    ("D. Mitochondria", "letter", "D"),
    ("All cells Divide", "letter", None),
    ("The answer is A, not B.", "letter", "A"),
    ("Therefore, the answer is yes.", "word", "yes"),
    ("The answer is: Maybe, since", "word", "maybe"),
    ("the answer is NO!", "word", "no"),
    ("the answer is yesterday", "word", None),
    ("the answer is unknown", "word", None),
    ("Yes", "word", "yes"),
    ("Nobody knows", "word", None),
    (r"\boxed{\text{no}}", "word", "no"),
]

# gold, answer, same
MATHS = [
    ("1/2", "0.5", True),
    (r"\frac12", r"\dfrac{1}{2}", True),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
    ("1/3", "0.333", False),
    ("1/2", "2/1", False),
    (r"3\frac{1}{2}", "3.5", True),
    ("7 1/2", "7.5", True),
    ("7 100/3", "7100/3", False),
    (r"50\%", "50", True),
    ("50%", "0.5", True),
    (r"50\%", "0.5", True),
    ("50%", "5", False),
    ("1,234,567", "1234567", True),
    ("1000000", r"1{,}000{,}000", True),
    (r"1\,000", "1000", True),
    ("1 000", "1000", True),
    ("3", "3,000", False),
    ("$18", "18", True),
    (r"\$18.00", "18", True),
    ("18", "18 dollars", True),
    ("18", "19 dollars", False),
    ("£5", "5", True),
    (r"5\text{ cm}", "5", True),
    ("5 cm", "5", True),
    ("12 square feet", "12", True),
    ("60 miles per hour", "60", True),
    ("5", "5 million", False),
    ("5 million", "5000000", True),
    ("2", "2 pi", False),
    (r"90^\circ", "90", True),
    ("90°", "90", True),
    ("-0", "0", True),
    ("−3", "-3", True),
    ("-3", "3", False),
    ("1.5e3", "1500", True),
    ("1e-3", "0.001", True),
    (r"3 \times 10^{8}", "300000000", True),
    ("3×10^8", "300000000", True),
    ("100", "1e3", False),
    ("(1,2)", "(1, 2)", True),
    ("(2,3)", "(3,2)", False),
    ("[1,2)", "(1,2)", False),
    (r"(-\infty,3]", r"(-\infty, 3]", True),
    ("(-∞, 3]", r"(-\infty,3]", True),
    (r"\{1,2,3\}", r"\{3,2,1\}", True),
    ("1,2,3", "3, 2, 1", True),
    (r"\{1,2\}", r"\{1,2,3\}", False),
    ("5", "x=5", True),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", True),
    (r"\frac{\pi}{2}", "π/2", True),
    ("(x+1)^2", "x^2+2x+1", True),
    ("(x+1)^2", "x^2+1", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    (r"x \le 3", r"x\leq 3", True),
    (r"5\pm\sqrt{2}", r"5+\sqrt{2},5-\sqrt{2}", True),
    ("12", "12.00", True),
    (".5", "0.5", True),
    ("4!", "24", True),
    (r"\text{even}", "Even", True),
    (r"\text{even}", "odd", False),
    ("listen", "silent", False),
    (r"\text{Evelyn}", "Evelyn", True),
    (r"\text{(B)}", "B", True),
    ("A", "B", False),
    ("12_5", "12_{5}", True),
    ("12_5", "12_7", False),
    ("11", "1", False),
]


def test_the_table_is_as_long_as_promised():
    assert len(RESPONSES) + len(MATHS) >= 60


@pytest.mark.parametrize(("text", "kind", "expected"), RESPONSES)
def test_extraction(text, kind, expected):
    labels = {"math": (), "letter": "ABCD", "word": ("yes", "no", "maybe")}[kind]
    assert extract(text, kind, labels) == expected


@pytest.mark.parametrize(("gold", "answer", "same"), MATHS)
def test_equivalence(gold, answer, same):
    pytest.importorskip("math_verify")
    assert equivalent(gold, answer, "math") == same
    assert equivalent(answer, gold, "math") == same


def test_letters_and_words_are_compared_as_text():
    assert equivalent("Yes", "yes.", "text")
    assert not equivalent("0.5", "1/2", "text")


def test_an_answer_that_takes_forever_is_a_wrong_one():
    pytest.importorskip("math_verify")
    assert not equivalent("5", "9^{9^{9^{9^{9}}}}", "math", timeout_s=1)
