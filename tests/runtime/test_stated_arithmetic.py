"""The bundled verifier: arithmetic that a step states is right, wrong, or not judged."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from runtime.verifiers.stated_arithmetic import has_wrong_equation, verify

RIGHT = [
    "30 - 6 = 24",
    "13 - 9 = 4 (left: 4 4 10)",
    "So 3 x 4 = 12 and 12 / 5 = 2.4.",
    "(2 + 3) * 4 = 20, which is 5 * 4 = 20.",
    "The total is $16 - $7 = $9 a day.",
    r"\[ 16 - 3 - 4 = 9 \text{ eggs} \]",
    r"$\frac{1}{2} + \frac{1}{3} = \frac{5}{6}$",
    r"9 \times 2 = \boxed{18}",
    "- 2^10 = 1,024",
    "1. 4 + 3 = 7",
    "**3**2 = 9**",
    "x = 9 / 3 = 3",
    "10 / 3 = 3.33",
    "-3 - -5 = 2",
    "2 + 2 == 4 => 4 + 0 = 4",
]
WRONG = [
    "9 / 4 = 3",
    "13 - 9 = 5 (left: 4 4 10)",
    "So 3 x 4 = 12 and 12 / 5 = 2.",
    "(2 + 3) * 4 = 14",
    "The total is $16 - $7 = $8 a day.",
    r"\[ 16 - 3 - 4 = 8 \text{ eggs} \]",
    r"$\frac{1}{2} + \frac{1}{3} = \frac{2}{5}$",
    r"9 \times 2 = \boxed{19}",
    "- 2^10 = 1,000",
    "(which is 4 + 3 = 8)",
    "4 + 3 = 7 + 2 = 9",
    "10 / 3 = 3.34",
    "9 / 4 = 2.3",
    "4 / 0 = 0",
    "x = 9 / 4 = 3",
    "-3^2 = 9",
]
UNSAID = [
    "",
    "I think that it is 7.",
    "3 = 4",
    "2x + 3 = 9",
    "x + 3 = 9",
    "f(3) + 1 = 9",
    "half of 10 + 2 = 7",
    "log 8 + 1 = 4",
    "√16 + 1 = 5",
    "20% of 50 + 1 = 11",
    "1/2 hour = 30 minutes",
    "2 apples + 3 apples = 6 apples",
    "7 / 2 = 3 remainder 1",
    "7 / 2 = 3 and a half",
    "7 / 2 = 3 1/2",
    "9 + 5 = 2 (mod 12)",
    "5! + 1 = 7",
    "3,5 + 1 = 4",
    "12:30 + 1 = 13",
    "22 / 7 ≈ 3.14",
    "3 + 4 <= 8",
    "3 + 4 ≠ 8",
    "2(3 + 4) = 15",
    "4 + 3 = 7th",
    "Step 2 - 4 + 3 = 7",
    "3-5 pages = 3",
]


@pytest.mark.parametrize("step", RIGHT)
def test_what_is_right(step: str) -> None:
    """Right equations in the forms that models write: prose, lists, money, LaTeX."""
    assert not has_wrong_equation(step)


@pytest.mark.parametrize("step", WRONG)
def test_what_is_wrong(step: str) -> None:
    """Wrong equations in the same forms; every ``=`` is checked."""
    assert has_wrong_equation(step)


@pytest.mark.parametrize("step", UNSAID)
def test_what_it_does_not_judge(step: str) -> None:
    """Text without arithmetic, or that may mean something else, is not judged."""
    assert not has_wrong_equation(step)


def test_the_last_step_of_each_path_is_judged() -> None:
    """A verifier gets a list of questions and steps, and gives a number for each last step."""
    batch = [
        {"question": "?", "steps": ["9 / 4 = 3", "30 - 6 = 24"]},
        {"question": "?", "steps": ["30 - 6 = 24", "9 / 4 = 3"]},
    ]
    assert verify(batch) == [1.0, 0.0]
    assert verify([]) == []


@pytest.mark.parametrize("task", ["game24", "countdown", "wordproblem", "blocksworld"])
def test_nothing_is_wrong_with_right_solutions(task: str) -> None:
    """Correct solutions of the bundled tasks state nothing wrong."""
    rng = random.Random(7)
    for question in TASKS[task].questions("train", limit=40):
        steps = TASKS[task].solve(question, rng)
        assert not any(map(has_wrong_equation, steps))


leaves = st.one_of(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n))),
    st.decimals(0, 99, places=2).map(lambda d: (str(d), Fraction(d))),
)


def joined(
    sign: str, left: tuple[str, Fraction], right: tuple[str, Fraction]
) -> tuple[str, Fraction]:
    """An expression and its value; a division by zero becomes a product."""
    (a, x), (b, y) = left, right
    if sign == "/" and not y:
        sign = "*"
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else x * y}[sign]
    return f"({a} {sign} {b})", value


expressions = st.recursive(
    leaves, lambda inner: st.builds(joined, st.sampled_from("+-*/"), inner, inner), max_leaves=8
).filter(lambda expression: expression[0].startswith("("))


@given(expressions, st.fractions(-99, 99, max_denominator=50).filter(bool))
def test_equality_is_exact(expression: tuple[str, Fraction], error: Fraction) -> None:
    """The exact value is right and any other one, of no more digits than are checked, is wrong."""
    text, value = expression
    wrong = value + error
    assert not has_wrong_equation(f"{text} = {value.numerator} / {value.denominator}")
    assert has_wrong_equation(f"{text} = {wrong.numerator} / {wrong.denominator}")
    assert has_wrong_equation(f"So: {wrong.numerator}/{wrong.denominator} = {text}, we know")


@given(st.text(st.sampled_from("0123456789.,:+-*/^x=()[]{}\\$% \nabfrctext√−×") | st.characters()))
def test_any_text_has_a_verdict(text: str) -> None:
    """Any text gets a verdict, and without ``=`` it is 1.0."""
    assert verify([{"question": "", "steps": [text]}])[0] in (0.0, 1.0)
    assert verify([{"question": "", "steps": [text.replace("=", "")]}]) == [1.0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9^9 = 1",
        "2**99999999 = 1",
        f"{'(' * 20_000}1{')' * 20_000} + 1 = 2",
        "(" * 40_000 + "= 1",
        f"{'9' * 40_000} + 1 = 3",
        f"{'1,' * 20_000}1 + 1 = 3",
        f"{'7 * ' * 10_000}7 = 1",
        f"{'1/7 * ' * 10_000}1 = 1",
        "1 + 1 = 2 = " * 4_000,
        "-" * 40_000 + "1 = 1",
        "a" * 40_000 + "1 + 1 = 2",
        "1 " + " " * 40_000 + "+ 1 = 2",
        r"\frac{" * 10_000,
        r"\text{" * 10_000,
        "x-" * 4_000,
        "\n \t" * 10_000,
    ],
    ids=lambda text: text[:12],
)
def test_monstrous_steps_are_left_alone(text: str) -> None:
    """Huge numbers, powers and nestings are not computed, so no step takes long."""
    assert not has_wrong_equation(text)
