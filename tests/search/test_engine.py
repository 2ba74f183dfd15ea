"""What engines say of themselves, and of a tree's KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.engine import KvMoved, Reproducible
from tests.search.scripted_engine import ScriptedEngine


@pytest.mark.parametrize(
    ("exact", "seeded", "said"),
    [(True, True, "exact"), (False, True, "seeded"), (False, False, "no")],
)
def test_how_far_a_seed_gives_the_same_tree(exact: bool, seeded: bool, said: Reproducible) -> None:
    """Bit for bit, up to rounding, or not at all."""
    able = replace(ScriptedEngine().capabilities, exact=exact, seeded=seeded)
    assert able.reproducible == said


def test_what_nobody_looked_at_is_told_with_the_next_look() -> None:
    """Nodes of both looks, each as it was last; the totals are today's."""
    first = KvMoved(held=9, capacity=20, cached={1: 4, 2: 0})
    second = KvMoved(held=12, capacity=20, cached={2: 7})
    assert second.after(None) is second
    assert second.after(first) == KvMoved(held=12, capacity=20, cached={1: 4, 2: 7})
