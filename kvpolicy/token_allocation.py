"""ArborKV's extractive mode: equations (2) and (3), and which tokens of a block they keep. Lossy.

Every block keeps only some tokens, so later steps read other KV than under full retention, and the
KV that is kept is private to its tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvpolicy.eviction_order import Infeasible, Ints
from kvpolicy.value import Floats

Variant = Literal["ratio", "share"]
"""``ratio``: r = α·w, equation (2) as printed. ``share``: k = α·w, so r = α·w/n, what the paper's
optimisation view gives. They agree where all blocks are equally long."""

_ROUNDING = 1e-9
_NOTHING = 1e-300
"""A gain below this counts as 0: no reachable α lifts the block off its floor."""


@dataclass(frozen=True, slots=True)
class Floors:
    """The least that every block keeps: ``ratio`` r_min in [0, 1], ``tokens`` K_min, ``tail``
    L_tail."""

    ratio: float = 0.05
    tokens: int = 8
    tail: int = 8

    def of(self, tokens: Ints) -> Ints:
        """Equation (3) at r = r_min for blocks of these lengths (n,)."""
        return keep_counts(np.full(len(tokens), self.ratio), tokens, self)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The result of equations (2) and (3): the scale α, and r and k of each block (n,)."""

    alpha: float
    ratios: Floats
    counts: Ints


def keep_ratios(alpha: float, gain: Floats, floors: Floors) -> Floats:
    """Equation (2): r = clip(α·gain, r_min, 1), (n,)."""
    return np.minimum(np.maximum(alpha * gain, floors.ratio), 1.0)


def keep_counts(ratios: Floats, tokens: Ints, floors: Floors) -> Ints:
    """Equation (3): k = min(n, max(K_min, |T|, ⌊r·n⌋)), |T| = min(L_tail, n); all (n,).

    1e-9 is added before rounding down, so that a whole number with rounding noise stays whole.
    """
    share = np.floor(ratios * tokens + _ROUNDING).astype(np.int64)
    return np.minimum(tokens, np.maximum(share, max(floors.tokens, floors.tail)))


def allocate(
    weight: Floats,
    tokens: Ints,
    whole: np.ndarray,
    budget: int,
    floors: Floors,
    variant: Variant = "ratio",
    most: Ints | None = None,
) -> Allocation:
    """Find the largest α whose kept tokens fit the budget, and how many tokens each block keeps.

    ``weight`` (n,) >= 0 is equation (2) without α; ``tokens`` (n,) >= 1; ``whole`` (n,): the blocks
    of Path*, kept whole; ``most`` (n,): the tokens of each block that still exist, by default all.
    Without rounding down, the tokens kept grow piecewise linearly with α; between the breakpoints,
    where a block leaves its floor or becomes whole, α follows from the slope. O(n log n). Raises
    Infeasible if Path* and the floors alone exceed the budget.
    """
    most = tokens if most is None else most
    lowest = np.where(whole, most, np.minimum(floors.of(tokens), most))
    needed = int(lowest.sum())
    if needed > budget:
        raise Infeasible(needed, budget, "active paths and the floors of all other blocks")
    gain = weight / tokens if variant == "share" else weight
    pull = np.where(whole, 0.0, gain * tokens)
    bottom = np.minimum(np.maximum(lowest, floors.ratio * tokens), most)
    alpha = _scale(pull, bottom, most, budget)
    ratios = np.where(whole, 1.0, keep_ratios(alpha, gain, floors))
    counts = np.minimum(keep_counts(ratios, tokens, floors), most)
    return Allocation(alpha, ratios, np.where(whole, most, counts))


def _scale(pull: Floats, lowest: Floats, tokens: Ints, budget: int) -> float:
    """The largest useful α for which the sum of min(n, max(lowest, α·pull)) is within budget."""
    moving = (pull > _NOTHING * tokens) & (lowest < tokens)
    fixed = float(lowest[~moving].sum())
    pull, lowest, size = pull[moving], lowest[moving], tokens[moving].astype(np.float64)
    if not len(pull):
        return 0.0
    starts, ends = lowest / pull, size / pull
    breaks = np.sort(np.concatenate([starts, ends]))

    def total(alpha: float) -> float:
        return fixed + float(np.minimum(size, np.maximum(lowest, alpha * pull)).sum())

    low, high = 0, len(breaks)
    while low < high:
        middle = (low + high) // 2
        if total(float(breaks[middle])) <= budget:
            low = middle + 1
        else:
            high = middle
    if low == len(breaks):
        return float(breaks[-1])
    start = float(breaks[low - 1]) if low else 0.0
    slope = float(pull[(starts <= start) & (start < ends)].sum()) if low else 0.0
    remaining = budget - total(start)
    return min(start + remaining / slope, float(breaks[low])) if slope > 0 else start


def select(size: int, keep: int, tail: int, attention: Floats | None = None) -> Ints:
    """Choose ``keep`` of a block's ``size`` tokens; their positions, ascending.

    First the last ``tail`` ones, then those that later tokens attended to most (``attention``
    (size,); ties go to the lower position). Without ``attention`` the last ``keep`` ones.
    """
    end = min(tail, keep)
    if attention is None:
        return np.arange(size - keep, size, dtype=np.int64)
    order = np.argsort(-attention[: size - end], kind="stable")
    heavy = np.sort(order[: keep - end])
    return np.concatenate([heavy, np.arange(size - end, size, dtype=np.int64)])
