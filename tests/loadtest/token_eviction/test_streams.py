"""The tokens that the stream policies keep, with which ArborKV is compared, each by hand."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.token_eviction.token_eviction_policies import (
    STREAMS,
    h2o,
    streaming_llm,
    tail_only,
    thinkv,
)


def ids(*numbers: int) -> np.ndarray:
    """An int64 array."""
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("length", "budget", "expected"), [(8, 3, [5, 6, 7]), (2, 3, [0, 1]), (3, 0, [])]
)
def test_tail_only(length: int, budget: int, expected: list[int]) -> None:
    """It keeps the last three of eight tokens, or all where there are fewer than the budget."""
    assert tail_only(np.zeros(length), ids(length), budget).tolist() == expected


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [(10, 6, [0, 1, 2, 3, 8, 9]), (10, 3, [0, 1, 2]), (5, 9, [0, 1, 2, 3, 4]), (3, 0, [])],
)
def test_streaming_llm_keeps_sinks_and_a_window(
    length: int, budget: int, expected: list[int]
) -> None:
    """Six of ten tokens with four sinks: the first four and the last two."""
    assert streaming_llm(np.zeros(length), ids(length), budget).tolist() == expected


@pytest.mark.parametrize(
    ("budget", "expected"), [(4, [1, 4, 6, 7]), (3, [1, 6, 7]), (9, list(range(8))), (0, [])]
)
def test_h2o_halves_its_budget_between_recent_and_heavy(budget: int, expected: list[int]) -> None:
    """Four of eight: 6 and 7 are recent, 1 and 4 the heaviest of the rest."""
    attention = np.array([0.1, 0.9, 0.2, 0.3, 0.8, 0.1, 0.0, 0.0])
    assert h2o(attention, ids(8), budget).tolist() == expected


def test_older_thoughts_get_half_of_what_the_next_one_gets() -> None:
    """Thoughts of 16, 16 and 4 tokens, 20 to keep: the newest whole, the others 5 and 10."""
    attention = np.arange(36.0)[::-1].copy()
    places = thinkv(attention, ids(16, 16, 4), 20)
    assert places.tolist() == [*range(5), *range(16, 26), *range(32, 36)]


def test_the_newest_thought_stays_whole_however_long_it_is() -> None:
    """20 of 25 tokens are its own; the older one has 5, though half of 20 would be 10."""
    assert thinkv(np.zeros(28), ids(8, 20), 25).tolist() == [*range(5), *range(8, 28)]


def test_streams_by_name() -> None:
    """Ten tokens in thoughts of 6 and 4, room for 5: each policy's own choice."""
    attention = np.array([0.0, 5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    places = {name: keep(attention, ids(6, 4), 5).tolist() for name, keep in STREAMS.items()}
    assert places == {
        "tail_only": [5, 6, 7, 8, 9],
        "streaming_llm": [0, 1, 2, 3, 9],
        "h2o": [1, 3, 7, 8, 9],
        "thinkv": [0, 1, 3, 5, 6, 7, 8, 9],
    }, "ThinKV's least, four of each thought and the newest whole, stays whatever the budget"
