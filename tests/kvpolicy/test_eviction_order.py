"""Equation (2) as an order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvpolicy.eviction_order import EvictionParams, eviction_weights, static_weight


def ids(*numbers: int) -> np.ndarray:
    """An int64 array."""
    return np.array(numbers, dtype=np.int64)


def test_equation_two_by_hand() -> None:
    """s 0.8, γ 2, d 3, λd 0.1, Δ 2, λΔ 0.3, η 0.5: 0.64 e^-0.3 e^-0.6, and half of it off path."""
    params = EvictionParams(depth_decay=0.1)
    static_weights = static_weight(np.array([0.8, 0.8]), ids(3, 3), params)
    weights = eviction_weights(static_weights, np.array([False, True]), ids(2, 2), params)
    on_path = 0.64 * math.exp(-0.3) * math.exp(-0.6)
    assert weights == pytest.approx([on_path, on_path / 2])


def test_params_may_be_as_large_or_small_as_their_ranges_say() -> None:
    """η 1 and γ, λd, λΔ 0: the score is out of the weight, and so are path, depth and distance."""
    flat = EvictionParams(off_path=1.0, sharpness=0.0, depth_decay=0.0, distance_decay=0.0)
    static_weights = static_weight(np.array([0.8, 0.2]), ids(3, 1), flat)
    assert eviction_weights(static_weights, np.array([False, True]), ids(0, 2), flat).tolist() == [
        1.0,
        1.0,
    ]
