"""Answers to maths questions: equal ones are found, and nothing that could take long is tried."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import server.maths
from server.maths import Maths, looks_like_maths, read


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("0.5", "1/2"),
        ("0.5", r"\frac{1}{2}"),
        ("0.333333", r"\frac13"),
        ("1000000", "1e6".replace("e", r"\times 10^")),
        ("3.0", "3"),
        ("50\\%", r"\frac{1}{2}"),
        ("90^\\circ", "90"),
        (r"\sqrt{2}", "2^{1/2}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\sin(2x)", r"2\sin(x)\cos(x)"),
        ("a+b", "b+a"),
        ("3+4i", "4i+3"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"(1,\frac{4}{2})", "(1,2)"),
        ("x=3", "3"),
        ("x<3", "3>x"),
        ("2^{100}", "1267650600228229401496703205376"),
    ],
)
def test_equal_answers_are_the_same_both_ways(first: str, second: str) -> None:
    """Values, algebra, sets and solved equations are compared in both orders."""
    assert Maths().same(first, second)
    assert Maths().same(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1", "2"),
        ("0.5", "1/3"),
        ("x+1", "x+2"),
        ("(1,2)", "(1,3)"),
        ("[1,2]", "(1,2)"),
        ("x=3", "x=4"),
        ("x=3", "y=3"),
        (r"\sqrt{x^2}", "x"),
        ("Paris", "Pairs"),  # words are not products of symbols
        ("A", "B"),
        ("ten 10", "10 ten"),
    ],
)
def test_different_answers_are_not(first: str, second: str) -> None:
    """Unequal values and unequal words differ, in both orders."""
    assert not Maths().same(first, second)
    assert not Maths().same(second, first)


@pytest.mark.promise(
    "The server compares an answer that could take long to evaluate only as it is written."
)
@pytest.mark.parametrize(
    "answer",
    [
        r"\binom{1000000000}{500000000}",  # evaluated while it is parsed
        "1000000!",
        "9^{9^9}",
        "e^{e^{e^{9}}}",
        "2^{1000000}",
        "((((((x+1))))))",  # the parser's time grows exponentially
        "(x+y+z+1)^{16}",
        "x^{16}+3x^7=5",  # solving takes seconds
        r"\sin(x)+x=1",
        r"\sum_{n=1}^{1000} n",
        r"\text{5 cm}",
        "+".join(["x"] * 70),
        "1" * 41,
        "x$+$1",
        r"\frac{1}{",
        r"\frac{1}{0}\frac",
    ],
)
def test_what_could_take_long_is_compared_as_it_is_written(answer: str) -> None:
    """It is not parsed or not compared, and is counted as unread."""
    assert looks_like_maths(answer) == (answer != r"\text{5 cm}")
    maths = Maths()
    assert not maths.same("7", answer)
    assert maths.unread == (answer != r"\text{5 cm}")


def test_the_number_of_comparisons_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the spelling decides; values that are far apart do not count."""
    pairs: list[object] = []
    monkeypatch.setattr(server.maths, "verify", lambda *pair, **_: pairs.append(pair))
    monkeypatch.setattr(server.maths, "MOST_COMPARED", 5)
    maths = Maths()
    for n in range(9):
        assert not maths.same(f"{n}", f"{n + 1}")
        assert not maths.same(f"x={n}", f"x={n + 1}")
    assert len(pairs) == 2 * 5
    assert not maths.same("x=1", "x=01")


SIZED = st.recursive(
    st.sampled_from(["x", "y", "2", "0.5", r"\pi", "17"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map("".join),
        st.tuples(inner, inner).map(lambda two: rf"\frac{{{two[0]}}}{{{two[1]}}}"),
        st.tuples(inner, st.integers(-3, 3)).map(lambda two: f"({two[0]})^{{{two[1]}}}"),
        inner.map(lambda radicand: rf"\sqrt{{{radicand}}}"),
    ),
    max_leaves=3,
)


@settings(max_examples=15)
@given(SIZED)
@example("(0)^{-1}")
def test_an_answer_equals_itself_and_its_bracketed_self(answer: str) -> None:
    """This holds for every answer that can be read."""
    if looks_like_maths(answer) and read(answer) and read(f"({answer})"):
        assert Maths().same(answer, f"({answer})")


@given(st.text(r"\{}()[]^_+-*/=<>!|%$., xy0129efracsqt", max_size=40))
@settings(max_examples=60)
def test_any_text_is_read_or_not(text: str) -> None:
    """No text that a model may write raises."""
    Maths().same(text, "3")


def test_reading_an_answer_again_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each spelling is parsed once in a search."""
    spellings: list[str] = []
    monkeypatch.setattr(server.maths, "read", spellings.append)
    maths = Maths()
    for first, second in pairwise(["x+1", "x+2", "x+1", "x+2"]):
        maths.same(first, second)
    assert spellings == ["x+1", "x+2"]
    assert maths.unread == 2
