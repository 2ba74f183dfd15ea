"""What backtracking policies count in a tree, by hand."""

from __future__ import annotations

import pytest

from search.policies.visit_counts import (
    VisitCounts,
    best_of,
    expansions_below,
    hand_out,
    heads,
    leads,
)
from search.tree import Finish, NodeState, Tree
from tests.search.trees import END, STEP, row, tree_of


def small() -> Tree:
    """Below 1 a step has ended (3) and one is open (4); below 2 an empty step died (5)."""
    return tree_of(
        (0, "a", STEP, 0.8),
        (0, "b", STEP, 0.4),
        (1, "c", END, 0.9),
        (1, "d", STEP, 0.6),
        (2, "", Finish.EMPTY, None),
    )


def test_every_step_is_a_visit() -> None:
    """N and Q of 0 to 5; 1 counts itself, 3 and 4: 0.8 + 0.9 + 0.6."""
    visits = VisitCounts.of(small(), "mcts", lambda _: True)
    assert visits.count == [5, 3, 2, 1, 1, 1]
    assert visits.units == [27_000, 23_000, 4_000, 9_000, 6_000, 0]
    assert visits.mean(visits.tree[1]) == pytest.approx(2.3 / 3)
    assert VisitCounts.of(row(0.0029), "mcts", lambda _: True).units == [29, 29], (
        "28.999... in floats"
    )


def test_every_finished_trajectory_is_a_visit() -> None:
    """Only 3 counts, for itself, 1 and the root; each node starts with one visit of reward 0."""
    finished = VisitCounts.of(small(), "best_first", lambda n: n.state is NodeState.FINISHED, 1)
    assert finished.count == [2, 2, 1, 2, 1, 1]
    assert finished.units == [9_000, 9_000, 0, 9_000, 0, 0]


def test_a_virtual_visit_is_one_more_of_the_whole_path() -> None:
    """A virtual visit to 4 counts for 4, 1 and the root; sums of rewards do not change."""
    visits = VisitCounts.of(small(), "mcts", lambda _: True)
    units = list(visits.units)
    visits.pass_through(visits.tree[4])
    assert visits.count == [6, 4, 2, 1, 2, 1]
    assert visits.units == units
    visits.pass_through(visits.tree[0])
    assert visits.count[0] == 7


def test_expansions_are_counted_by_the_branch() -> None:
    """With two children an expansion 3 children are two expansions, the second cut short."""
    tree = tree_of(*((0, f"s{i}", STEP, 0.5) for i in range(3)), (1, "a", STEP, 0.5))
    assert expansions_below(tree, 2) == [3, 1, 0, 0, 0]


def test_children_are_handed_out_until_the_width_is() -> None:
    """1 and 2 get three each, 3 one; the root completes an expansion that was cut short."""
    tree = row(0.5, 0.5, 0.5, 0.5)
    nodes = tree.nodes[1:]
    assert hand_out(nodes, 3, 7) == {1: 3, 2: 3, 3: 1}
    assert hand_out([tree[0]], 3, 7) == {0: 2}


def test_heads_are_the_best_of_the_last_expansions() -> None:
    """0 was expanded twice: 3 leads its last two, which have no children; 1 has children 5 and 6.

    Of these the better one has ended, so that path has no head. Below 2 the better one is 8.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.8),
        (0, "c", STEP, 0.7),
        (0, "d", STEP, 0.7),
        (1, "e", END, 0.9),
        (1, "f", STEP, 0.8),
        (2, "g", STEP, 0.1),
        (2, "h", STEP, 0.95),
    )
    assert [head.id for head in heads(tree, 2)] == [8, 3]
    assert [head.id for head in heads(tree, 4)] == [8]
    assert [head.id for head in heads(row(0.5, 0.5), 2)] == [1]
    assert heads(tree_of(), 2) == []
    assert [head.id for head in heads(row(0.0, 0.5), 2)] == [2], "a reward of 0 is one"


def test_twins_are_known_by_their_first() -> None:
    """2 repeats 1, 5 below 2 repeats 4 below 1; 6 is another path's. A twin is never a head."""
    tree = tree_of(
        (0, "a", STEP, 0.9),
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.5),
        (1, "c", STEP, 0.8),
        (2, "c", STEP, 0.8),
        (3, "c", STEP, 0.7),
    )
    assert [node.first for node in tree.nodes] == [0, 1, 1, 3, 4, 4, 6]
    assert [head.id for head in heads(tree, 3)] == [4, 6]


def test_who_leads() -> None:
    """The highest reward among siblings, finished ones included; ties to the lower id."""
    tree = small()
    assert [leads(tree, node) for node in tree.nodes] == [True, True, False, True, False, False]
    assert best_of([tree[5]]) is None
