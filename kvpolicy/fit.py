"""Fit θ by weighted logistic regression to which blocks of recorded searches were needed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpolicy.value import SIGNALS, Floats, Mode, Theta, subsets

RIDGE = 1e-3
"""Penalty on squared coefficients, for a mean row weight of 1; keeps the coefficients of separable
rows finite."""
_ITERATIONS = 100
_CLOSE = 1e-10


class ReentryRows(NamedTuple):
    """Recorded blocks, all fields (n,); a missing signal is NaN.

    ``target`` in [0, 1] is what the score should be; ``weight`` >= 0 is how much the row counts. In
    exact mode a row is a block off the path at some event: its target is 1 if it came back onto
    the path later, else 0, and its weight is the tokens that it would cost to compute again.
    """

    v: Floats
    u: Floats
    a: Floats
    target: Floats
    weight: Floats


def together(parts: Sequence[ReentryRows]) -> ReentryRows:
    """Concatenate the rows of one or more recordings."""
    return ReentryRows(*map(np.concatenate, zip(*parts, strict=True)))


def losses(theta: Theta, rows: ReentryRows) -> dict[str, float]:
    """Each signal set's weighted mean cross-entropy per row, in nats.

    Only rows that have all of the estimator's signals count, so that the sets can be compared; the
    empty set predicts the same share for every row. Empty if no row with weight has all signals.
    """
    complete = np.all([~np.isnan(getattr(rows, name)) for name in theta.signals], axis=0)
    complete = np.broadcast_to(complete, rows.target.shape)
    weight, entropies = rows.weight[complete], {}
    for name, (bias, *slopes) in theta.sets.items() if weight.sum() > 0 else ():
        columns = [getattr(rows, signal)[complete] for signal in name]
        logit = sum(map(np.multiply, slopes, columns), np.full(len(weight), bias))
        entropy = np.logaddexp(0.0, logit) - rows.target[complete] * logit
        entropies[name] = float(weight @ entropy / weight.sum())
    return entropies


def fit(rows: ReentryRows, mode: Mode, source: Mapping[str, Any] | None = None) -> Theta:
    """Fit θ for every subset of the signals that occur in the rows.

    A subset is fitted to the rows that have all its signals. Raises ValueError if there are none.
    """
    signals = "".join(s for s in SIGNALS if not np.all(np.isnan(getattr(rows, s))))
    sets = {}
    for name in subsets(signals):
        columns = [getattr(rows, signal) for signal in name]
        complete = np.ones(len(rows.target), dtype=bool)
        for column in columns:
            complete &= ~np.isnan(column)
        features = np.stack([column[complete] for column in columns], axis=1) if columns else None
        if not np.any(rows.weight[complete] > 0):
            raise ValueError(f"rows: none with weight has the signals {name!r} all present")
        target, weight = rows.target[complete], rows.weight[complete]
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
        probability = 1.0 / (1.0 + np.exp(-(design @ theta)))
        gradient = design.T @ (weight * (probability - target)) + RIDGE * theta
        hessian = (design.T * (weight * probability * (1.0 - probability))) @ design
        step = np.linalg.solve(hessian + RIDGE * np.eye(len(theta)), gradient)
        size = 1.0
        before = _loss(design, target, weight, theta)
        while _loss(design, target, weight, theta - size * step) > before and size > _CLOSE:
            size /= 2
        theta = theta - size * step
        if np.max(np.abs(size * step)) < _CLOSE:
            break
    return tuple(float(value) for value in theta)


def _loss(design: Floats, target: Floats, weight: Floats, theta: Floats) -> float:
    """Weighted cross-entropy plus the ridge penalty."""
    logit = design @ theta
    entropy = np.logaddexp(0.0, logit) - target * logit
    return float(weight @ entropy + RIDGE / 2 * theta @ theta)
