"""Careless derivations: a number is misquoted now and then, and later steps build on it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train.careless import OFF_BY, careless

STORIES = TASKS["wordproblem"]
STORY = "How many books does Eve have? Dan has 40 books. Dan has books and Eve has twice as many."
seeds = st.integers(0, 2**32).map(random.Random)


@given(seeds)
def test_without_slips_it_is_a_teachers_derivation(rng: random.Random) -> None:
    """The checker finds no fault in it."""
    question, _ = STORIES.lesson(rng)
    assert STORIES.check(question, STEP_BREAK.join(careless(question, rng, slips=0.0))).correct


@given(seeds)
def test_a_number_misquoted_is_gone_on_from(rng: random.Random) -> None:
    """The sum with the wrong number is right, and the answer repeats its result."""
    conclusion, answer = careless(STORY, rng, slips=1.0)
    dans = int(conclusion.split("Dan has ")[1].split()[0])
    assert dans - 40 in OFF_BY
    assert (
        f"{dans} books and Eve has twice as many, so Eve has {dans} * 2 = {dans * 2}." in conclusion
    )
    assert answer == f"The answer is {dans * 2}."


def test_only_word_problems_are_worked_out() -> None:
    """The error for another question quotes it."""
    with pytest.raises(ValueError, match="not a word problem: 'Use 4 9 10 13"):
        careless("Use 4 9 10 13 to make 24.", random.Random(0))
