"""`loadtest.sglang_pools`: which run's numbers a cell's row has."""

from __future__ import annotations

from dataclasses import replace

from loadtest.searches import REBASE_8, Method, grow_all, unlike_items
from loadtest.sglang_pools import AMPLE_TOKENS, CELLS, QUICK, PoolSearches, measured
from tests.search.scripted_engine import ScriptedEngine


async def test_a_row_by_hand() -> None:
    """Of three searches one is the same, one has another answer, and one is lost."""
    items = unlike_items("game24", 3)
    same, changed, failed = await grow_all(ScriptedEngine(), items, Method("one", REBASE_8), 3)
    same.stats.engine.rehydrated_tokens, same.stats.engine.held_back_seconds = 7, 0.5
    changed.stats.engine.rehydrated_tokens, changed.stats.engine.held_back_seconds = 5, 1.0
    failed.stats.engine.rehydrated_tokens = 3
    first = PoolSearches([same, changed, failed], seconds=4.0, most=2, total=90)
    ours = PoolSearches(
        [same, replace(changed, answer="another"), "gone"], seconds=3.0, most=3, total=80
    )
    row = measured("ets", 330, [(first, ours)])
    assert (row["searches"], row["lost"], row["different"]) == (3, 1, 2)
    assert (row["lru_again"], row["plugin_again"]) == (12 + 3, 12)
    assert (row["requests_a_round"], row["requests"], row["held_seconds"]) == (3, 80, 1.5)
    assert row["wall_vs_lru"] == [0.75, 0.75, 0.75]
    slow = replace(first, seconds=2.0), replace(ours, seconds=2.5)
    row = measured("ets", AMPLE_TOKENS, [(first, ours), (first, ours), slow])
    assert row["wall_vs_free"] == [0.75, 0.75, 1.25]
    assert (row["searches"], row["pairs"], row["lost"], row["different"]) == (3, 3, 3, 6)
    assert row["requests"] == 80
    assert "lru_again" not in row


def test_the_cells() -> None:
    """There are six, of which one pool fits all, and two in a quick run."""
    assert (len(CELLS), len(QUICK)) == (6, 2)
    assert CELLS[0] == ("ets", 4, 330)
    assert [pool for _, _, pool in CELLS].count(AMPLE_TOKENS) == 1
