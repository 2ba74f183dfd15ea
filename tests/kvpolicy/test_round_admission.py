"""Which searches may run a round: by hand, and what holds of any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.round_admission import may_run

NEEDS = st.lists(st.integers(1, 400), max_size=12)
CAPACITY = st.integers(1, 1000)


@pytest.mark.parametrize(
    ("needs", "may"),
    [
        ([], []),
        ([100, 100, 100], [True, True, True]),
        ([200, 200, 50], [True, False, True]),
        ([500, 1], [True, False]),
        ([300, 1], [True, False]),
        ([299, 1, 1], [True, True, False]),
    ],
    ids=["none", "all fit", "a smaller one", "too large alone", "full", "one more"],
)
def test_by_hand(needs: list[int], may: list[bool]) -> None:
    """In a pool of 300."""
    assert may_run(needs, 300) == may


@given(NEEDS, CAPACITY)
def test_the_pool_holds_those_that_run(needs: list[int], capacity: int) -> None:
    """But for one that is larger alone: it runs alone. A pool that fits all holds nothing back."""
    may = may_run(needs, capacity)
    together = sum(need for need, runs in zip(needs, may, strict=True) if runs)
    assert together <= capacity or (sum(may) == 1 and may[0])
    if sum(needs) <= capacity:
        assert all(may)


@given(NEEDS, NEEDS, CAPACITY)
def test_nothing_later_holds_a_search_back(older: list[int], later: list[int], pool: int) -> None:
    """It is decided by those before it alone: new ones starve nobody."""
    assert may_run(older + later, pool)[: len(older)] == may_run(older, pool)


@given(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=5), max_size=8), CAPACITY)
def test_every_search_ends(searches: list[list[int]], capacity: int) -> None:
    """Each has so many rounds of so many tokens; as long as any is left, one may run."""
    left = [list(rounds) for rounds in searches]
    while left:
        may = may_run([rounds[0] for rounds in left], capacity)
        assert any(may)
        for rounds, runs in zip(left, may, strict=True):
            if runs:
                rounds.pop(0)
        left = [rounds for rounds in left if rounds]
