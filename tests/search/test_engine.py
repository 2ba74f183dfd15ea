"""Engines' capabilities, and their reports of a tree's KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.engine import Ahead, Branch, KvMoved, Reproducible
from search.tree import step_seed
from tests.search.scripted_engine import ScriptedEngine


@pytest.mark.parametrize(
    ("exact", "seeded", "expected"),
    [(True, True, "exact"), (False, True, "seeded"), (False, False, "no")],
)
def test_how_far_a_seed_gives_the_same_tree(
    exact: bool, seeded: bool, expected: Reproducible
) -> None:
    """``exact`` is bit for bit, ``seeded`` up to rounding, ``no`` not at all."""
    able = replace(ScriptedEngine().capabilities, exact=exact, seeded=seeded)
    assert able.reproducible == expected


def test_what_nobody_looked_at_is_told_with_the_next_look() -> None:
    """Two reports combine each node's latest number with the second report's totals."""
    first = KvMoved(held=9, capacity=20, cached={1: 4, 2: 0})
    second = KvMoved(held=12, capacity=20, cached={2: 7})
    assert second.after(None) is second
    assert second.after(first) == KvMoved(held=12, capacity=20, cached={1: 4, 2: 7})


def test_a_child_begun_early_is_the_one_that_the_round_asks_for() -> None:
    """It has the right prefix, the seed of its path, and the tokens that its parent left."""
    branch = Branch(3, 1, (7, 8), 5, 10, 4, Ahead(seed=9, path=(0, 1), children=2, room=12))
    child = branch.early_child(1, (20, 21), most=64)
    assert child == Branch(4, 1, (7, 8, 20, 21), step_seed(9, (0, 1, 1)), 10, -1)
    assert child.draws_as(replace(child, node=6))
    assert not child.draws_as(replace(child, limit=9))
    assert branch.early_limit(12, 64) < 1
    assert replace(branch, ahead=None).early_limit(0, 64) == 0
