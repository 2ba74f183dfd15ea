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
    return bootstrap95_by_group([differences], seed)


def bootstrap95_by_group(groups: Sequence[Sequence[float]], seed: int = 0) -> list[float]:
    """As ``bootstrap95``, of the mean of the groups' means; items are drawn within their group."""
    if not groups or not all(groups):
        raise ValueError("differences: empty; at least one item is needed")
    rng, means = np.random.default_rng(seed), np.zeros(RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        means += values[rng.integers(0, values.size, (RESAMPLES, values.size))].mean(axis=1)
    low, high = np.quantile(means / len(groups), (0.025, 0.975))
    return [float(low), float(high)]


def differences(mine: Sequence[bool], other: Sequence[bool]) -> list[float]:
    """What each item gains (1), loses (-1) or keeps (0). The sequences hold the same items."""
    return [float(a) - float(b) for a, b in zip(mine, other, strict=True)]
