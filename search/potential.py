"""How many children of a beam are worth drawing before a round asks for them.

A step's reward is much like that of the step before it, so a beam's previous reward says how likely
it is to be kept (FlashTTS, section 4.1.1).
"""

from __future__ import annotations

from collections.abc import Sequence


def potentials(rewards: Sequence[float | None], branching: int) -> list[int]:
    """The children that each live beam may run ahead, from its previous reward.

    The rewards' range is cut into ``branching`` bins of equal width; a beam in the j-th from the
    top gets ``branching`` - j + 1. Where all are equal, all are in the top bin; a beam without a
    reward gets one. Raises ValueError for a ``branching`` below 1.
    """
    if branching < 1:
        raise ValueError(f"branching: {branching}; at least 1 is needed")
    known = [reward for reward in rewards if reward is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return [1 if r is None else _potential(r, low, high, branching) for r in rewards]


def _potential(reward: float, low: float, high: float, branching: int) -> int:
    if high == low:
        return branching
    from_bottom = int((reward - low) / (high - low) * branching)
    return min(from_bottom, branching - 1) + 1
