"""Sibling steps from one state have the kinds that the checkers find."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tasks import TASKS, number_puzzle
from models.tasks.task import STEP_BREAK
from models.train.measure import mean_interval, share_above
from models.train.siblings import DEAD_END, RIGHT, WASTED, near_misses, siblings

RANDOM = st.integers(0, 2**32).map(random.Random)


@pytest.mark.parametrize("name", ["game24", "countdown", "blocksworld"])
@settings(max_examples=25)
@given(RANDOM)
def test_kinds_are_what_the_checkers_find(name: str, rng: random.Random) -> None:
    """One sibling is right; dead ends and wasted moves are legal; all other kinds are illegal."""
    task = TASKS[name]
    question = task.lesson(rng)[0]
    family = siblings(name, question, rng)
    assert RIGHT in {sibling.kind for sibling in family.steps}
    for sibling in family.steps:
        text = STEP_BREAK.join([*family.before, sibling.text])
        *before, right = task.check(question, text).steps
        assert all(before)
        assert right == (sibling.kind == RIGHT), sibling
        illegal = task.first_illegal(question, text) is not None
        assert illegal == (sibling.kind not in (RIGHT, DEAD_END, WASTED)), sibling


def test_near_misses_by_hand() -> None:
    """From 9 and 4 with target 24 the near misses are all false steps of each kind."""
    legal = list(number_puzzle.moves((4, 9)))
    misses = near_misses((4, 9), 24, legal)
    texts = {
        kind: [number_puzzle.step_text(move) for move in moves] for kind, moves in misses.items()
    }
    assert texts["remainder"] == ["9 / 4 = 2 (left: 2)", "9 / 4 = 3 (left: 3)"]
    assert "9 + 4 = 12 (left: 12)" in texts["off by one"]
    assert "9 + 4 = 36 (left: 36)" in texts["operator"]
    assert texts["forged"] == [f"9 {op} 4 = 24 (left: 24)" for op in "+-*"]
    assert "9 + 4 = 13 (left: 4 13)" in texts["kept"]
    assert "9 + 9 = 18 (left: 4 18)" in texts["used twice"]
    assert texts["dropped"] == []


def test_stories_have_none() -> None:
    question = TASKS["wordproblem"].questions("train", 1)[0]
    with pytest.raises(ValueError, match="no siblings are known of 'How many"):
        siblings("wordproblem", question, random.Random(1))


def test_shares_and_their_intervals_by_hand() -> None:
    """Of four pairs two are in order and one is a tie; intervals of means are by hand too."""
    assert share_above([0.9, 0.4], [0.4, 0.5]) == (2 + 0.5) / 4
    assert mean_interval([1.0, 1.0, 0.0, 0.0]) == [0.01, 0.99]
    assert mean_interval([1.0, 1.0]) == [1.0, 1.0]
