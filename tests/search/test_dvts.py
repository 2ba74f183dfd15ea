"""DVTS: independent subtrees, worked by hand and compared with one beam search each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.policies.beam import Beam
from search.policies.dvts import Dvts
from search.policies.policy import Round, share_evenly
from search.spec import SearchSpec
from search.tree import Finish, Tree
from tests.search.trees import END, STEP, tree_of


@pytest.mark.parametrize(
    ("width", "beam_width", "subtrees"), [(16, None, 4), (10, None, 4), (2, 5, 2)]
)
def test_subtrees_default_to_the_rounded_up_root(
    width: int, beam_width: int | None, subtrees: int
) -> None:
    """ceil(sqrt(width)), or ``beam_width``; never more subtrees than trajectories."""
    assert Dvts.from_spec(SearchSpec(width=width, beam_width=beam_width)) == Dvts(width, subtrees)


def test_deeper_leaves_belong_to_their_ancestors_subtree() -> None:
    """Nodes 5 and 6 stand below node 2, 7 and 8 below node 3."""
    lines = [(0, "s", STEP, 0.5)] * 4
    below = ((2, "e", STEP, 0.3), (2, "f", STEP, 0.4), (3, "g", STEP, 0.9), (3, "h", STEP, 0.8))
    tree = tree_of(*lines, *below)
    for node in (1, 4):
        tree.prune(node)
    assert Dvts(4, 2).plan(tree) == Round({6: 2, 7: 2}, (5, 8))


def test_a_dead_subtree_leaves_its_share_to_the_living() -> None:
    """Three subtrees of two; the middle one died: the other two get one child more each."""
    lines = [(0, "a", STEP, 0.5)] * 2
    empty = [(0, "\n\n", Finish.EMPTY, None)] * 2
    tree = tree_of(*lines, *empty, *lines)
    assert Dvts(6, 3).plan(tree) == Round({1: 3, 5: 3}, (2, 6))


def test_an_odd_rest_of_a_dead_subtree_goes_to_the_lower_one() -> None:
    """The dead subtree had finished one of two: its other place goes to the first subtree."""
    lines = [(0, "a", STEP, 0.5)] * 2
    tree = tree_of(*lines, (0, "x", END, 0.1), (0, "\n\n", Finish.EMPTY, None), *lines)
    assert Dvts(6, 3).plan(tree) == Round({1: 3, 5: 2}, (2, 6))


level = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=24)


@given(level, st.integers(1, 24))
def test_a_living_subtree_is_a_beam_of_one(level_steps: list[tuple[int, bool]], k: int) -> None:
    """Without deaths each subtree plans what ``beam`` with one beam plans on it alone."""
    lines = [(0, "s", END if is_end else STEP, r / 5) for r, is_end in level_steps]
    width, start = len(lines), 1
    subtrees = min(k, width)
    expand: dict[int, int] = {}
    living = 0
    for share in share_evenly(width, range(subtrees)).values():
        part = tree_of(*lines[start - 1 : start - 1 + share])
        living += any(True for _ in part.leaves())
        plan = Beam(share, 1).plan(part)
        expand |= {} if plan is None else {n + start - 1: c for n, c in plan.expand.items()}
        start += share
    tree = tree_of(*lines)
    plan = Dvts(width, subtrees).plan(tree)
    finished = Counter(is_end for _, is_end in level_steps)[True]
    if finished == width:
        assert plan is None
    else:
        assert plan is not None
        assert plan.expand == expand
        assert sum(plan.expand.values()) == width - finished
        assert set(plan.expand) | set(plan.prune) == {leaf.id for leaf in tree.leaves()}


@given(st.data(), st.integers(1, 12), st.integers(1, 12))
def test_however_subtrees_die_every_kept_leaf_draws(
    data: st.DataObject, width: int, beams: int
) -> None:
    """With random ends and deaths every planned leaf gets a child, and rounds spend the width."""
    policy = Dvts(width, min(beams, width))
    tree = Tree((1,))
    for _ in range(4):
        plan = policy.plan(tree)
        if plan is None:
            break
        assert min(plan.expand.values()) >= 1
        assert sum(plan.expand.values()) == width - len(tree.finished())
        for node in plan.prune:
            tree.prune(node)
        for node in sorted(plan.expand):
            for _ in range(plan.expand[node]):
                finish = data.draw(st.sampled_from([STEP, STEP, END, Finish.EMPTY]))
                tree.add(node, (2,), "s", finish).reward = data.draw(st.sampled_from([0.2, 0.5]))
