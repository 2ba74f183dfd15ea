"""Fitting θ to recorded rows."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.fit import RIDGE, ReentryRows, fit, logistic

NONE = np.full(4, np.nan)


def test_the_bias_alone_is_the_weighted_mean() -> None:
    """Three of four with weight 1, 1, 1, 3: logit(3/6) = 0."""
    target, weight = np.array([1.0, 1.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 3.0])
    assert logistic(np.empty((4, 0)), target, weight) == pytest.approx([0.0], abs=1e-9)


def test_two_groups_are_fitted_to_their_means() -> None:
    """One binary feature: bias is logit of the mean at 0, bias plus coefficient that at 1."""
    feature = np.array([[0.0]] * 4000 + [[1.0]] * 4000)
    target = np.array([0.2] * 4000 + [0.9] * 4000)
    bias, slope = logistic(feature, target, np.ones(8000))
    assert bias == pytest.approx(np.log(0.2 / 0.8), abs=1e-4)
    assert bias + slope == pytest.approx(np.log(0.9 / 0.1), abs=1e-4)


def slope_at_the_result(features: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    """The largest derivative of the loss, where it should be 0."""
    theta = np.array(logistic(features, target, weight))
    design = np.concatenate([np.ones((len(target), 1)), features], axis=1)
    chance = 1 / (1 + np.exp(-design @ theta))
    slope = design.T @ (weight / weight.mean() * (chance - target)) + RIDGE * theta
    return float(np.max(np.abs(slope)))


def test_the_slope_of_the_loss_is_zero_at_the_result() -> None:
    """Checks the first-order condition itself rather than a reference implementation."""
    draw = np.random.default_rng(0)
    features, weight = draw.random((300, 3)), draw.random(300)
    target = (draw.random(300) < features[:, 0]).astype(float)
    assert slope_at_the_result(features, target, weight) < 1e-7


def test_steps_that_go_too_far_are_halved() -> None:
    """On these rows full Newton steps from 0 never converge."""
    features = np.array([[-17.0], [3.0], [0.0], [-2.0], [-4.0]])
    target, weight = np.array([0.0, 1.0, 0.0, 1.0, 1.0]), np.array([1e4, 10.0, 1e4, 1.0, 1.0])
    assert slope_at_the_result(features, target, weight) < 1e-7


def test_a_bias_that_is_right_at_once_does_not_end_the_fit() -> None:
    """By symmetry the bias is 0 from the start; the slope takes several steps to logit 0.9."""
    feature = np.array([[-1.0]] * 4000 + [[1.0]] * 4000)
    target = np.array([0.1] * 4000 + [0.9] * 4000)
    assert logistic(feature, target, np.ones(8000)) == pytest.approx([0.0, np.log(9)], abs=1e-4)


def test_separable_rows_stay_finite_and_equal() -> None:
    """A signal that decides everything gets a large coefficient, the same one every time."""
    features, target = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([0.0, 0.0, 1.0, 1.0])
    first = logistic(features, target, np.ones(4))
    assert first == logistic(features, target, np.ones(4))
    assert 5 < first[1] < 100


def test_every_subset_of_what_was_recorded_is_fitted() -> None:
    """Rows without attention mass give the four subsets of v and u."""
    v, u = np.array([0.9, 0.8, 0.2, np.nan]), np.array([0.5, 0.6, 0.5, 0.4])
    rows = ReentryRows(v, u, NONE, np.array([1.0, 1.0, 0.0, 0.0]), np.array([9.0, 9.0, 9.0, 9.0]))
    theta = fit(rows, "exact", {"task": "by hand"})
    assert set(theta.sets) == {"", "v", "u", "vu"}
    assert theta.signals == "vu"
    assert theta.source == {"task": "by hand"}
    high, low = theta.score([0.9, 0.2], [0.5, 0.5], [np.nan, np.nan])
    assert high > 0.5 > low


def test_dear_blocks_count_for_more() -> None:
    """Of two rows with equal signals and different targets, the one with more weight decides."""
    v = np.array([0.5, 0.5])
    none = np.full(2, np.nan)
    target = np.array([1.0, 0.0])
    first = fit(ReentryRows(v, none, none, target, np.array([9.0, 1.0])), "exact")
    assert first.score([0.5], [np.nan], [np.nan])[0] == pytest.approx(0.9, abs=0.01)


def test_signals_never_seen_together_are_refused() -> None:
    """If no row has both v and u, the set "vu" cannot be fitted."""
    v, u = np.array([0.5, np.nan]), np.array([np.nan, 0.5])
    rows = ReentryRows(v, u, NONE[:2], np.array([0.0, 1.0]), np.ones(2))
    with pytest.raises(ValueError, match="'vu'"):
        fit(rows, "exact")


def test_rows_that_count_for_nothing_are_refused() -> None:
    """Rows whose weights are all 0 are refused like no rows."""
    rows = ReentryRows(np.full(2, 0.5), NONE[:2], NONE[:2], np.array([0.0, 1.0]), np.zeros(2))
    with pytest.raises(ValueError, match="rows: none with weight"):
        fit(rows, "exact")
