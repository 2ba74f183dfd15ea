"""Keeps the mean cost of past searches, for estimates."""

from __future__ import annotations

from typing import Any

from search.outcome import Outcome

MOST_KINDS = 1024


class TypicalCost:
    """The cost of this server's searches so far, by policy and width."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[int, int, float]] = {}

    def note(self, outcome: Outcome) -> None:
        """Add the cost of a finished search."""
        kind = outcome.spec.policy, outcome.spec.width
        if kind in self._sums or len(self._sums) < MOST_KINDS:
            count, tokens, seconds = self._sums.get(kind, (0, 0, 0.0))
            stats = outcome.stats
            self._sums[kind] = (
                count + 1,
                tokens + stats.generated_tokens,
                seconds + stats.seconds,
            )

    def typical(self, policy: str, width: int) -> dict[str, Any] | None:
        """The mean cost of searches of this policy and width, None if there was none."""
        if (policy, width) not in self._sums:
            return None
        count, tokens, seconds = self._sums[policy, width]
        return {
            "completion_tokens": round(tokens / count),
            "seconds": round(seconds / count, 3),
            "searches": count,
        }
