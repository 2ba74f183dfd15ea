"""``hedgerow_sglang.gumbel_max`` finds the winners that computing all of the noise gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hedgerow_sglang import gumbel_max as module
from hedgerow_sglang.gumbel_max import gumbel_max
from hedgerow_sglang.noise import gumbel_of, hashes

MASK = 2**32 - 1
EXTREMES = [0, 1, 2, MASK // 2, MASK - 2, MASK - 1, MASK]


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the shortcut for small inputs, which computes all of their noise."""
    monkeypatch.setattr(module, "FEW", 0)


def with_all_noise(
    scores: NDArray[np.float64], hashed: NDArray[np.uint32], count: int
) -> NDArray[np.int64]:
    """The ``count`` best ids of each row by definition: with every token's noise computed."""
    values = scores + gumbel_of(hashed)
    best = np.full((len(scores), count), -1)
    for row, row_values in enumerate(values):
        ids = sorted((-value, i) for i, value in enumerate(row_values) if value > -np.inf)[:count]
        best[row, : len(ids)] = [i for _, i in ids]
    return best


def test_by_hand() -> None:
    """The greatest hash has noise 22.18, hash 1 has -3.10: a gap of 26 is too wide to win."""
    hashed = np.array([[1, MASK], [1, MASK]], dtype=np.uint32)
    assert gumbel_max(np.array([[25.0, 0.0], [26.0, 0.0]]), hashed)[:, 0].tolist() == [1, 0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, -1.0, -1e-9, -3.0, -21.0, -22.18, -25.3, -800.0, -np.inf]),
            st.sampled_from(EXTREMES) | st.integers(0, MASK),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_extremes_and_ties(tokens: list[tuple[float, int]], count: int) -> None:
    scores = np.array([[score for score, _ in tokens]])
    hashed = np.array([[word for _, word in tokens]], dtype=np.uint32)
    winners = gumbel_max(scores, hashed, count)
    assert np.array_equal(winners, with_all_noise(scores, hashed, count))


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_real_size(spread: float, count: int) -> None:
    """Rows from nearly uniform to one token that is nearly certain."""
    scores = np.random.default_rng(0).normal(0, spread, (20, 5000))
    hashed = hashes(range(20), range(20), 5000)
    winners = gumbel_max(scores, hashed, count)
    assert np.array_equal(winners, with_all_noise(scores, hashed, count))
