"""Fits θ to what recorded searches show in hindsight: weighted logistic regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpolicy.value import SIGNALS, Floats, Mode, Theta, subsets

RIDGE = 1e-3
"""Penalty on squared coefficients against a mean row weight of 1: keeps separable data finite."""
_ITERATIONS = 100
_CLOSE = 1e-10


class ReentryRows(NamedTuple):
    """Recorded blocks, all fields (n,); a missing signal is NaN.

    ``target`` in [0, 1] is what the score should be; ``weight`` >= 0 is how much the row counts. In
    exact mode a row is a block off the path at some event: it is worth its chance of re-entry, 1
    where it came back onto the path later, else 0, and counts for more the more tokens it would
    cost to compute again.
    """

    v: Floats
    u: Floats
    a: Floats
    target: Floats
    weight: Floats


def together(parts: Sequence[ReentryRows]) -> ReentryRows:
    """The rows of several recordings, at least one, in this order."""
    return ReentryRows(*map(np.concatenate, zip(*parts, strict=True)))


def losses(theta: Theta, rows: ReentryRows) -> dict[str, float]:
    """What each set leaves unsaid of the target: weighted mean cross-entropy a row, in nats.

    Over the rows that have all of the estimator's signals, so that sets can be compared; the empty
    set's is what the share of those that came back leaves. Empty if there is no such row.
    """
    whole = np.all([~np.isnan(getattr(rows, name)) for name in theta.signals], axis=0)
    whole = np.broadcast_to(whole, rows.target.shape)
    weight, entropies = rows.weight[whole], {}
    for name, (bias, *slopes) in theta.sets.items() if weight.sum() > 0 else ():
        columns = [getattr(rows, signal)[whole] for signal in name]
        logit = sum(map(np.multiply, slopes, columns), np.full(len(weight), bias))
        entropy = np.logaddexp(0.0, logit) - rows.target[whole] * logit
        entropies[name] = float(weight @ entropy / weight.sum())
    return entropies


def fit(rows: ReentryRows, mode: Mode, source: Mapping[str, Any] | None = None) -> Theta:
    """θ for every subset of the signals that some row has.

    A subset is fitted to the rows that have all of it. Raises ValueError if there are none.
    """
    recorded = "".join(s for s in SIGNALS if not np.all(np.isnan(getattr(rows, s))))
    sets = {}
    for name in subsets(recorded):
        columns = [getattr(rows, signal) for signal in name]
        whole = np.ones(len(rows.target), dtype=bool)
        for column in columns:
            whole &= ~np.isnan(column)
        features = np.stack([column[whole] for column in columns], axis=1) if columns else None
        if not np.any(rows.weight[whole] > 0):
            raise ValueError(f"rows: none with weight has the signals {name!r} all present")
        target, weight = rows.target[whole], rows.weight[whole]
        sets[name] = logistic(
            np.empty((len(target), 0)) if features is None else features, target, weight
        )
    return Theta(mode, sets, dict(source or {}))


def logistic(features: Floats, target: Floats, weight: Floats) -> tuple[float, ...]:
    """Bias and coefficients (k + 1) of the ridge logistic regression of ``target`` (n,) in [0, 1].

    ``features`` (n, k); ``weight`` (n,), not all 0. Newton's method with step halving from 0:
    the loss is strictly convex, so the result depends on nothing but the rows.
    """
    design = np.concatenate([np.ones((len(target), 1)), features], axis=1)
    weight = weight / weight.mean()
    theta = np.zeros(design.shape[1])
    for _ in range(_ITERATIONS):
        chance = 1.0 / (1.0 + np.exp(-(design @ theta)))
        slope = design.T @ (weight * (chance - target)) + RIDGE * theta
        bend = (design.T * (weight * chance * (1.0 - chance))) @ design
        step = np.linalg.solve(bend + RIDGE * np.eye(len(theta)), slope)
        size = 1.0
        before = _loss(design, target, weight, theta)
        while _loss(design, target, weight, theta - size * step) > before and size > _CLOSE:
            size /= 2
        theta = theta - size * step
        if np.max(np.abs(size * step)) < _CLOSE:
            break
    return tuple(float(value) for value in theta)


def _loss(design: Floats, target: Floats, weight: Floats, theta: Floats) -> float:
    """Weighted cross-entropy and penalty."""
    logit = design @ theta
    entropy = np.logaddexp(0.0, logit) - target * logit
    return float(weight @ entropy + RIDGE / 2 * theta @ theta)
