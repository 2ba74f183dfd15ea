"""What a tree under token eviction has cost."""

from __future__ import annotations

from dataclasses import dataclass

from search.counters import Counters, counter


@dataclass(slots=True)
class TokenEvictionCost(Counters):
    """A tree's counters, and what only token eviction counts.

    ``rehydrations``: paths that were made whole again.
    """

    active: int = counter("Most tokens that a wave read or wrote.", maximum=True)
    again_seconds: float = counter("Time spent on making paths whole again.", zero=0.0)
    policy_seconds: float = counter("Time spent on deciding what is evicted.", zero=0.0)
