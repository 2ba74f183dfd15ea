"""`python -m loadtest.sglang_eviction`: what is compared with what."""

from __future__ import annotations

import pytest

from loadtest.sglang_eviction import against_lru, spec_of


def row(policy: str, mode: str, recomputed: int) -> dict:
    return {"policy": policy, "mode": mode, "recomputed_tokens": recomputed}


def test_each_search_policy_has_an_lru_of_its_own() -> None:
    """100 of 400 is a quarter; where lru read nothing again there is no share."""
    rows = [row("best_first", "lru", 400), row("best_first", "arborkv", 100)]
    rows += [row("ets", "arborkv", 3), row("ets", "lru", 0)]
    found = [one["recomputed_vs_lru"] for one in against_lru(rows)]
    assert found == [1.0, 0.25, None, None]


@pytest.mark.parametrize("quick", [True, False])
def test_the_searches_are_spent_to_their_end(quick: bool) -> None:
    """A best-first search that stops at its first answer would hold little."""
    spec = spec_of("best_first", quick=quick)
    assert spec.enough_answers == spec.width
    assert spec.expansions == (64 if quick else 256)
    assert spec_of("ets", quick=quick).policy == "ets"
