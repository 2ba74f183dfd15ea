"""Lineages, twins and judged steps of a tree, on trees made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.anatomy import (
    JudgedStep,
    auc,
    distinct_replies,
    distinct_tokens,
    judged_steps,
    lineages_by_depth,
    step_labels,
)
from search.tree import Finish, Tree
from tests.search.trees import END, STEP, row, tree_of


def two_lineages() -> Tree:
    """Four first steps, of which the first two are twins, one is empty and one ends.

    Nodes 1 and 2 are ``a``, 3 is empty, 4 ends with ``z``; below 1 is ``b`` (5), below 2 ``b`` (6,
    a twin of 5) and ``c`` (7); below 6 the end ``y`` (8), below 7 ``y`` (9), another path's.
    """
    return tree_of(
        (0, "a", STEP, 0.8),
        (0, "a", STEP, 0.8),
        (0, "_", Finish.EMPTY, None),
        (0, "z", END, 0.3),
        (1, "b", STEP, 0.6),
        (2, "b", STEP, 0.6),
        (2, "cc", STEP, 0.7),
        (6, "y", END, 0.9),
        (7, "y", END, 0.2),
    )


def test_lineages_worked_by_hand() -> None:
    """``a`` and ``z`` live at every depth: ``a`` has a step there, ``z`` finished at depth 1."""
    assert lineages_by_depth(two_lineages()) == [2, 2, 2]
    assert lineages_by_depth(row(0.1, 0.2, 0.3)) == [3]
    assert lineages_by_depth(tree_of()) == []


def test_a_lineage_dies_where_nothing_of_it_was_drawn_further() -> None:
    """Three first steps; the second has children, all looping: it ends at depth 1."""
    tree = tree_of(
        (0, "a", STEP, 0.8),
        (0, "b", STEP, 0.8),
        (0, "c", STEP, 0.1),
        (1, "d", STEP, 0.6),
        (2, "b", Finish.LOOP, None),
    )
    assert lineages_by_depth(tree) == [3, 1]


def test_twins_count_once() -> None:
    """Replies z, aby, accy: three of three. Tokens a, _, z, b, cc, y, y: 8 of 10."""
    tree = two_lineages()
    assert distinct_replies(tree) == 3
    assert tree.generated_tokens == 10
    assert distinct_tokens(tree) == 8
    assert distinct_replies(tree_of((0, "z", END, 0.3), (0, "z", END, 0.3))) == 1


def test_labels_and_judged_steps_worked_by_hand() -> None:
    """``cc`` and all below it are wrong; its child is not judged, since its parent is wrong."""

    def check(text: str) -> list[bool]:
        steps = text.replace("cc", "c")
        return ["c" not in steps[: n + 1] for n in range(len(steps))]

    tree = two_lineages()
    labels = step_labels(tree, check)
    assert labels == {1: True, 4: True, 5: True, 7: False, 8: True, 9: False}
    assert judged_steps(tree, labels) == [
        JudgedStep(1, 0.8, True),
        JudgedStep(1, 0.3, True),
        JudgedStep(2, 0.6, True),
        JudgedStep(2, 0.7, False),
        JudgedStep(3, 0.9, True),
    ]


def test_paths_that_a_checker_cuts_otherwise_have_no_labels() -> None:
    """A path has no labels where the checker sees another number of steps."""
    assert step_labels(two_lineages(), lambda text: [True]) == {1: True, 4: True}
    assert step_labels(two_lineages(), lambda text: ()) == {}


def steps_of(right: list[float], wrong: list[float]) -> list[JudgedStep]:
    """Steps with these rewards."""
    return [JudgedStep(1, r, True) for r in right] + [JudgedStep(1, r, False) for r in wrong]


@pytest.mark.parametrize(
    ("right", "wrong", "value"),
    [
        # of (.9,.5), (.9,.7), (.5,.5), (.5,.7): two, a tie, none
        ([0.9, 0.5], [0.5, 0.7], 2.5 / 4),
        ([0.9], [0.1, 0.2], 1.0),
        ([0.1], [0.9], 0.0),
        ([0.4, 0.4], [0.4], 0.5),
        ([0.4], [], None),
        ([], [0.4], None),
    ],
)
def test_auc_by_hand(right: list[float], wrong: list[float], value: float | None) -> None:
    assert auc(steps_of(right, wrong)) == value


rewards = st.lists(st.integers(0, 20).map(lambda i: i / 20), min_size=1, max_size=12)


@given(rewards, rewards)
def test_auc_is_the_share_of_pairs(right: list[float], wrong: list[float]) -> None:
    """AUC equals the share of right-wrong pairs in order, ties counting half."""
    pairs = [(r > w) + (r == w) / 2 for r in right for w in wrong]
    assert auc(steps_of(right, wrong)) == pytest.approx(sum(pairs) / len(pairs))
