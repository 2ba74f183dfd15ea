"""Beam search's rounds, worked by hand."""

from __future__ import annotations

import pytest

from search.policies.beam import Beam
from search.policies.policy import Round
from search.spec import SearchSpec
from tests.search.trees import END, STEP, row, tree_of


@pytest.mark.parametrize(
    ("width", "beams"), [(1, 1), (2, 2), (4, 2), (5, 3), (16, 4), (17, 5), (64, 8), (1024, 32)]
)
def test_beams_default_to_the_rounded_up_root(width: int, beams: int) -> None:
    """ceil(sqrt(width)), exactly."""
    assert Beam.from_spec(SearchSpec(width=width)) == Beam(width, beams)


def test_a_given_beam_width_wins() -> None:
    """``beam_width`` replaces the default number of beams."""
    assert Beam.from_spec(SearchSpec(width=16, beam_width=2)) == Beam(16, 2)


def test_the_best_share_the_width_and_the_rest_is_pruned() -> None:
    """Rewards .2 .9 .4 .7: the best two, nodes 2 and 4, get 4 each of 8."""
    assert Beam(8, 2).plan(row(0.2, 0.9, 0.4, 0.7)) == Round({2: 4, 4: 4}, (1, 3))


def test_remainders_go_to_the_better_beams() -> None:
    """11 over three beams: 4 for the best two, 3 for the third; never 12."""
    plan = Beam(11, 3).plan(row(0.2, 0.9, 0.4, 0.7))
    assert plan == Round({2: 4, 4: 4, 3: 3}, (1,))


@pytest.mark.promise(
    "Beam search keeps the lower ids among equal rewards, and gives them the children left over."
)
def test_ties_go_to_the_lower_id() -> None:
    """Among equals the first two are kept, and the first gets the remainder."""
    assert Beam(5, 2).plan(row(0.5, 0.5, 0.5)) == Round({1: 3, 2: 2}, (3,))


def test_equal_leaves_are_one_beam() -> None:
    """Three leaves are ``a`` with reward .9: without the filter all three of them are beams."""
    tree = tree_of(*[(0, "a", STEP, 0.9)] * 3, (0, "b", STEP, 0.6), (0, "c", STEP, 0.2))
    assert Beam(6, 3).plan(tree) == Round({1: 2, 4: 2, 5: 2}, (2, 3))
    assert Beam(6, 3, filter_duplicates=False).plan(tree) == Round({1: 2, 2: 2, 3: 2}, (4, 5))


def test_fewer_distinct_leaves_than_beams_share_the_width() -> None:
    """With two distinct leaves for three beams each gets half of the width."""
    tree = tree_of(*[(0, "a", STEP, 0.9)] * 3, (0, "b", STEP, 0.6))
    assert Beam(6, 3).plan(tree) == Round({1: 3, 4: 3}, (2, 3))


def test_width_shrinks_by_finished_trajectories() -> None:
    """Three of width 4 have finished: only one of the open two goes on, although two beams may."""
    ends = [(0, "x", END, 0.1)] * 3
    tree = tree_of(*ends, (0, "a", STEP, 0.3), (0, "b", STEP, 0.6))
    assert Beam(4, 2).plan(tree) == Round({5: 1}, (4,))
