"""Equation (2) as an order, and what a budget keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.eviction_order import EvictionParams, eviction_weights, static_weight
from tests.kvpolicy.pressure import keep_within


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


def test_a_budget_keeps_whole_blocks_in_order_and_cuts_the_last() -> None:
    """Weights 0.2, 0.9, 0.5 and 10 tokens each: 14 tokens are all of the second, 4 of the third."""
    kept = keep_within(ids(10, 10, 10), np.array([0.2, 0.9, 0.5]), 14)
    assert kept.tolist() == [0, 10, 4]


def test_equal_weights_keep_the_lower_index() -> None:
    """Ties go to the lower id, so parents stay before children of the same weight."""
    assert keep_within(ids(3, 3, 3), np.array([0.5, 0.5, 0.5]), 4).tolist() == [3, 1, 0]


@given(
    blocks=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.1, 0.5, 0.9])), max_size=20),
    budget=st.integers(0, 200),
    more=st.integers(0, 50),
)
def test_budgets_are_used_and_never_exceeded_and_larger_ones_keep_a_superset(
    blocks: list[tuple[int, float]], budget: int, more: int
) -> None:
    """What is kept adds up to the budget, or to everything."""
    tokens = ids(*(size for size, _ in blocks))
    weight = np.array([w for _, w in blocks])
    kept = keep_within(tokens, weight, budget)
    assert kept.sum() == min(budget, tokens.sum())
    assert np.all(keep_within(tokens, weight, budget + more) >= kept)


def test_params_may_be_as_large_or_small_as_their_ranges_say() -> None:
    """η 1 and γ, λd, λΔ 0: the score is out of the weight, and so are path, depth and distance."""
    flat = EvictionParams(off_path=1.0, sharpness=0.0, depth_decay=0.0, distance_decay=0.0)
    static_weights = static_weight(np.array([0.8, 0.2]), ids(3, 1), flat)
    assert eviction_weights(static_weights, np.array([False, True]), ids(0, 2), flat).tolist() == [
        1.0,
        1.0,
    ]
