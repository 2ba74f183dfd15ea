"""`python -m loadtest.kv_places`: a row by hand, and a small run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.kv_places import FIT, WAYS, TimedOutcomes, measure, row_of
from loadtest.kv_plan import Case
from search.counters import Counters
from search.spec import SearchSpec

CASE = Case("blocksworld", "best_first", "S", SearchSpec(policy="best_first"))


def outcome(digest: str, rehydrations: int = 0) -> Any:
    """As much of an outcome as a row looks at."""
    cost = Counters(rehydrations=rehydrations)
    return SimpleNamespace(digest=digest, stats=SimpleNamespace(engine=cost))


def test_a_row_by_hand() -> None:
    """Two questions, three repeats: 6 s on average in place of 8, 9 and 12, one tree another."""
    whole = [outcome("aa"), outcome("bb")]
    slow = [TimedOutcomes([mean - 1, mean + 1], whole) for mean in (8.0, 9.0, 12.0)]
    quick = [TimedOutcomes([4.0, 8.0], [outcome("aa", 3), outcome("cc")]) for _ in slow]
    found = row_of(CASE, WAYS[2], {WAYS[0]: slow, WAYS[2]: quick}, 700, whole)
    assert (found["n"], found["repeats"], found["pool_tokens"]) == (2, 3, 700)
    assert found["seconds"] == 6.0
    assert found["latency_vs_full"] == pytest.approx(6 / 9), "the middle of 6/8, 6/9 and 6/12"
    assert found["problems_per_second"] == pytest.approx(2 / 8)
    assert (found["rehydrations"], found["identical_trees"]) == (1.5, 0.5)
    assert row_of(CASE, WAYS[0], {WAYS[0]: slow}, 700, whole)["latency_vs_full"] == 1.0


@pytest.mark.slow
def test_a_pool_for_two_ends_no_search() -> None:
    """Full retention, two at once, finds room; ArborKV grows the same trees eight at once."""
    rows = asyncio.run(measure(["blocksworld"], ["best_first"], 2, 1, 1))
    assert [(row["kv_policy"], row["at_once"]) for row in rows] == [
        ("full", FIT),
        ("arborkv", FIT),
        ("arborkv", 4 * FIT),
    ]
    for row in rows:
        assert row["identical_trees"] == 1.0
        assert row["seconds"] > 0
