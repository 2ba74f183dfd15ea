"""Confidence intervals (95 %) of the share of right replies."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def clustered95(right: Sequence[bool], n: int) -> list[float]:
    """The 95 % interval of a share over ``n`` questions, each answered once a seed.

    ``right``: seed by seed, the questions in the same order. Answers to a question correlate, so
    they count for less than answers to as many questions: it is Wilson's interval with the number
    of trials divided by the design effect (the variance of the questions' means over that of
    independent trials). With one seed it is Wilson's own. At least ``n`` trials are counted:
    further seeds do not make the questions fewer.
    """
    seeds = len(right) // n if n else 0
    if not seeds:
        return [0.0, 1.0]
    share = sum(right) / len(right)
    means = [sum(right[i::n]) / seeds for i in range(n)]
    between = math.fsum((mean - share) ** 2 for mean in means) / n**2
    independent = share * (1 - share) / len(right)
    effect = min(max(between / independent, 1.0), seeds) if independent else seeds
    return wilson95(share, len(right) / effect)


def wilson95(share: float, n: float) -> list[float]:
    """Wilson's 95 % interval of a share of ``n`` trials, [low, high]; [0, 1] without any trial."""
    if n == 0:
        return [0.0, 1.0]
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    low = 0.0 if share == 0 else centre - reach
    high = 1.0 if share == 1 else centre + reach
    return [low, high]
