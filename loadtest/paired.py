"""Two methods on the same items: the mean difference and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

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
    low, high = np.quantile(_means(groups, seed), (0.025, 0.975))
    return [float(low), float(high)]


def loss_p(differences: Sequence[float], seed: int = 0) -> float:
    """One-sided p of a loss: the share of resampled means that are no loss, at least 1e-4."""
    return max(float((_means([differences], seed) >= 0).mean()), 1 / RESAMPLES)


def _means(groups: Sequence[Sequence[float]], seed: int) -> NDArray[np.float64]:
    """Means of the resamples. SciPy needs two items per group, so a single one counts twice."""
    samples = [np.asarray(group if len(group) > 1 else [*group] * 2) for group in groups]

    def mean(*resampled: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return sum(sample.mean(axis=axis) for sample in resampled) / len(resampled)  # type: ignore[return-value]

    bootstrapped = bootstrap(samples, mean, n_resamples=RESAMPLES, method="percentile", rng=seed)
    return bootstrapped.bootstrap_distribution


def differences(mine: Sequence[bool], other: Sequence[bool]) -> list[float]:
    """What each item gains (1), loses (-1) or keeps (0). The sequences hold the same items."""
    return [float(a) - float(b) for a, b in zip(mine, other, strict=True)]
