"""Which searches may run a round and how many tokens a draw asks for: by hand and by property."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.round_admission import may_run, tokens_at_once, tokens_of

NEEDS = st.lists(st.integers(1, 400), max_size=12)
CAPACITY = st.integers(1, 1000)
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=8)
LENGTHS = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=8)


@pytest.mark.promise(
    "No round on SGLang waits when the KV pool has room for all of them, and the oldest search "
    "always runs."
)
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
    """Which of these needs may run in a pool of 300 tokens."""
    assert may_run(needs, 300) == may


@given(NEEDS, CAPACITY)
def test_the_pool_holds_those_that_run(needs: list[int], capacity: int) -> None:
    """Those that run fit the pool together, or one too large runs alone; if all fit, all run."""
    may = may_run(needs, capacity)
    together = sum(need for need, runs in zip(needs, may, strict=True) if runs)
    assert together <= capacity or (sum(may) == 1 and may[0])
    if sum(needs) <= capacity:
        assert all(may)


@given(NEEDS, NEEDS, CAPACITY)
def test_nothing_later_holds_a_search_back(older: list[int], later: list[int], pool: int) -> None:
    """Whether a search may run depends on older ones alone, so new searches starve nobody."""
    assert may_run(older + later, pool)[: len(older)] == may_run(older, pool)


@given(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=5), max_size=8), CAPACITY)
def test_every_search_ends(searches: list[list[int]], capacity: int) -> None:
    """As long as any search has rounds left, at least one may run, so all of them end."""
    remaining = [list(rounds) for rounds in searches]
    while remaining:
        may = may_run([rounds[0] for rounds in remaining], capacity)
        assert any(may)
        for rounds, runs in zip(remaining, may, strict=True):
            if runs:
                rounds.pop(0)
        remaining = [rounds for rounds in remaining if rounds]


@pytest.mark.parametrize(
    ("paths", "tokens"),
    [
        ([], 0),
        ([(1, 2, 3)], 3),
        ([(1, 2, 3)] * 5, 3),
        ([(1, 2, 3), (1, 2, 4), (1, 2)], 4),
        ([(1, 2), (2, 1)], 4),
    ],
    ids=["none", "one", "twins", "siblings and their parent", "nothing shared"],
)
def test_what_several_begin_with_is_held_once(paths: list[tuple[int, ...]], tokens: int) -> None:
    """The number of tokens that a tree of these paths takes, by hand."""
    assert tokens_of(paths) == tokens


@given(PATHS)
def test_paths_are_held_as_a_tree(paths: list[tuple[int, ...]]) -> None:
    """Paths take one token for each distinct prefix."""
    beginnings = {path[: end + 1] for path in paths for end in range(len(path))}
    assert tokens_of(paths) == len(beginnings)


@pytest.mark.promise(
    "A draw on SGLang requests the step length with which its round takes the fewest passes, or "
    "its limit if all fit or none has room."
)
@pytest.mark.parametrize(
    ("pool", "held_tokens", "most"),
    [(420, 90, 9), (420, 400, 32), (33 * 64 + 90, 90, 32), (50, 90, 32)],
    ids=["steps end early", "the round reads all that there is", "fits whole", "too small"],
)
def test_what_is_asked_for_at_once(pool: int, held_tokens: int, most: int) -> None:
    """64 draws of at most 32 tokens from a path of 90; of ten steps nine had 9 tokens, one 14.

    Beside the path there is room for 330: ten draws at 32 (7 waves of 15 passes, 105 in all), 22 at
    14 (3 of 15: 45), 33 at 9 (2 of 10, and one of 6 for the seven that go on: 26).
    """
    lengths = Counter({9: 9, 14: 1})
    tokens = tokens_at_once(
        lengths, draws=64, limit=32, pool=pool, held_tokens=held_tokens, longest=90
    )
    assert tokens == most


def test_before_any_step_was_drawn_all_is_asked_for() -> None:
    """Without known lengths each draw asks for the limit."""
    assert tokens_at_once({}, draws=64, limit=32, pool=300, held_tokens=20, longest=20) == 32


@given(LENGTHS, st.integers(1, 70), st.integers(1, 40), CAPACITY, st.data())
def test_less_is_asked_for_only_where_it_helps(
    lengths: dict[int, int], draws: int, limit: int, pool: int, data: st.DataObject
) -> None:
    """A draw asks for the limit, or for less only if not all draws have room at the limit: then for
    a length that earlier steps had, such that the average steps of all draws fit."""
    longest = data.draw(st.integers(1, pool))
    held_tokens = data.draw(st.integers(longest, 2 * pool))
    sizes = {
        "draws": draws,
        "limit": limit,
        "pool": pool,
        "held_tokens": held_tokens,
        "longest": longest,
    }
    most = tokens_at_once(lengths, **sizes)
    assert most == limit or (most in lengths and most < limit)
    if draws * (limit + 1) <= pool - longest:
        assert most == limit
    if most < limit:
        steps = sum(length * many for length, many in lengths.items())
        at_once = min(draws, (pool - longest) // (most + 1))
        assert held_tokens + at_once * steps / sum(lengths.values()) <= pool
