"""The policies ArborKV is compared with, each by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.eviction_order import Infeasible
from loadtest.token_eviction.token_eviction_baselines import (
    STREAMS,
    Stream,
    full,
    h2o,
    lru,
    streaming_llm,
    tail_only,
    thought_decay,
)


def ids(*numbers: int) -> np.ndarray:
    """An int64 array."""
    return np.array(numbers, dtype=np.int64)


def test_full_and_tail_only() -> None:
    """Everything, and the last three of eight."""
    assert full(3).tolist() == [0, 1, 2]
    assert tail_only(8, 3).tolist() == [5, 6, 7]
    assert tail_only(2, 3).tolist() == [0, 1]


def test_streaming_llm_keeps_sinks_and_a_window() -> None:
    """Six of ten tokens with four sinks: the first four and the last two."""
    assert streaming_llm(10, 6).tolist() == [0, 1, 2, 3, 8, 9]
    assert streaming_llm(10, 3).tolist() == [0, 1, 2]
    assert streaming_llm(5, 9).tolist() == [0, 1, 2, 3, 4]


def test_h2o_halves_its_budget_between_recent_and_heavy() -> None:
    """Four of eight: 6 and 7 are recent, 1 and 4 the heaviest of the rest."""
    attention = np.array([0.1, 0.9, 0.2, 0.3, 0.8, 0.1, 0.0, 0.0])
    assert h2o(attention, 4).tolist() == [1, 4, 6, 7]
    assert h2o(attention, 3).tolist() == [1, 6, 7]
    assert h2o(attention, 8).tolist() == h2o(attention, 9).tolist() == list(range(8))


def test_older_thoughts_get_half_of_what_the_next_one_gets() -> None:
    """Thoughts of 8, 8 and 4 tokens, 10 in all: the newest whole, 6 shared 2 to 4."""
    attention = np.arange(20.0)[::-1].copy()
    kept = thought_decay(ids(8, 8, 4), attention, 10, least=1)
    assert kept.tolist() == [0, 1, 8, 9, 10, 11, 16, 17, 18, 19]


def test_the_newest_thought_stays_whole_however_long_it_is() -> None:
    """20 of 22 tokens are its own; the older one has 2, though half of 20 would be 10."""
    kept = thought_decay(ids(8, 20), np.zeros(28), 22, least=1)
    assert kept.tolist() == [0, 1, *range(8, 28)]


def test_thoughts_whose_least_does_not_fit_are_refused() -> None:
    """Newest 4 and twice 4 at least are 12; a budget of 11 is not enough."""
    with pytest.raises(Infeasible, match="need 12"):
        thought_decay(ids(8, 8, 4), np.zeros(20), 11)
    with pytest.raises(ValueError, match="thoughts: 8 tokens; 20"):
        thought_decay(ids(8), np.zeros(20), 11)


def test_lru_gives_up_whole_leaves_used_longest_ago() -> None:
    """0-(1-(3), 2): leaf 2 was used last at 1, so it goes, then 3, then its parent 1."""
    tokens, used = ids(5, 5, 5, 5), ids(9, 7, 1, 7)
    free = np.array([True, False, False, False])
    assert lru(tokens, used, free, 19).tolist() == [5, 5, 0, 5]
    assert lru(tokens, used, free, 15).tolist() == [5, 5, 0, 5]
    assert lru(tokens, used, free, 12).tolist() == [5, 5, 0, 0]
    assert lru(tokens, used, free, 5).tolist() == [5, 0, 0, 0]
    with pytest.raises(Infeasible, match="locked blocks need 5"):
        lru(tokens, used, free, 4)


def test_streams_by_name() -> None:
    """Ten tokens in thoughts of 6 and 4, room for 5: each policy's own choice."""
    attention = np.array([0.0, 5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    kept = {name: keep(Stream(attention, ids(6, 4)), 5) for name, keep in STREAMS.items()}
    assert {name: positions.tolist() for name, positions in kept.items()} == {
        "tail_only": [5, 6, 7, 8, 9],
        "streaming_llm": [0, 1, 2, 3, 9],
        "h2o": [1, 3, 7, 8, 9],
        "thinkv": [0, 1, 3, 5, 6, 7, 8, 9],
    }, "ThinKV's least, four of each thought and the newest whole, stays whatever the budget"


def test_a_budget_of_nothing_keeps_nothing() -> None:
    """It is none that is refused."""
    for kept in (tail_only(3, 0), streaming_llm(3, 0), h2o(np.zeros(3), 0)):
        assert kept.tolist() == []
    assert lru(ids(3), ids(0), np.array([False]), 0).tolist() == [0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: tail_only(3, -1),
        lambda: streaming_llm(3, -1),
        lambda: h2o(np.zeros(3), -1),
        lambda: thought_decay(ids(3), np.zeros(3), -1),
        lambda: lru(ids(3), ids(0), np.array([False]), -1),
    ],
)
def test_a_negative_budget_is_refused(call) -> None:
    """By every peer."""
    with pytest.raises(ValueError, match="budget: -1"):
        call()
