"""Two methods on the same items: the mean difference and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def bootstrap95(differences: Sequence[float], seed: int = 0) -> list[float]:
    """The 95 % percentile interval [low, high] of the mean of ``differences``, one an item.

    The items are drawn again with replacement, ``RESAMPLES`` times, from a generator with this
    seed. Raises ValueError without items.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        raise ValueError("differences: empty; at least one item is needed")
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, values.size, (RESAMPLES, values.size))
    means = values[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return [float(low), float(high)]


def differences(mine: Sequence[bool], other: Sequence[bool]) -> list[float]:
    """What each item gains (1), loses (-1) or keeps (0). The sequences hold the same items."""
    return [float(a) - float(b) for a, b in zip(mine, other, strict=True)]
