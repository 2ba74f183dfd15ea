"""Clusters of steps, worked by hand and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.clusters import cluster, rounded

vectors = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20)


def at(*degrees: float) -> list[tuple[float, ...]]:
    """Unit vectors in a plane, rounded."""
    angles = np.radians(degrees)
    return rounded(np.stack([np.cos(angles), np.sin(angles)], -1).tolist())


def test_average_linkage_worked_by_hand() -> None:
    """At 0, 20 and 50 degrees: 0 and 20 join at 1 - cos 20 = .060; that pair and 50 at the mean of
    1 - cos 50 = .357 and 1 - cos 30 = .134, which is .246 (single linkage would give .134)."""
    assert cluster(at(0, 20, 50), 0.05) == [0, 1, 2]
    assert cluster(at(0, 20, 50), 0.07) == [0, 0, 1]
    assert cluster(at(0, 20, 50), 0.24) == [0, 0, 1]
    assert cluster(at(0, 20, 50), 0.25) == [0, 0, 0]


def test_clusters_are_numbered_by_first_appearance() -> None:
    """Numbers follow the input's order; equal vectors always have the same one."""
    assert cluster(at(90, 0, 90, 180, 1), 0.01) == [0, 1, 0, 2, 1]
    assert cluster(at(7, 7, 7), 0.0) == [0, 0, 0]
    assert cluster([], 0.1) == []


def test_the_number_of_equal_steps_moves_nothing() -> None:
    """Ten copies weigh no more than one in the average."""
    assert cluster(at(0, *[20] * 10, 50), 0.24) == [0] * 11 + [1]
    assert cluster(at(0, *[20] * 10, 50), 0.25) == [0] * 12


def test_entries_are_compared_as_the_whole_numbers_they_stand_for() -> None:
    """0.0029 is 29 ten-thousandths: the distance is 29**2 / 2e8 = 4.2e-6; 28 would give 3.9e-6."""
    assert cluster([(0.0, 1.0), (0.0029, 1.0)], 4.1e-6) == [0, 1]


def test_a_cosine_that_rounds_to_more_than_one_is_no_negative_distance() -> None:
    """(1, 1, 1) and its double have such a cosine; SciPy refuses negative distances."""
    assert cluster([(0.0001,) * 3, (0.0002,) * 3], 0.0) == [0, 0]


def test_a_vector_of_zeros_is_unlike_all_others() -> None:
    """It has no direction: its distance is 1, and it is like itself."""
    points = rounded([(0.0, 0.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.01)])
    assert cluster(points, 0.9) == [0, 1, 0, 1]


@settings(max_examples=60)
@given(vectors, st.floats(0, 2), st.integers(0, 2**32))
def test_order_and_length_change_no_cluster(
    raw_vectors: list[tuple[float, float, float]], threshold: float, seed: int
) -> None:
    """Scaled vectors are the same points, equal points share a cluster, calls are repeatable."""
    points = rounded(raw_vectors)
    assert rounded([tuple(4.0 * x for x in vector) for vector in raw_vectors]) == points
    labels = cluster(points, threshold)
    assert labels == cluster(points, threshold)
    assert sorted(set(labels)) == list(range(max(labels) + 1))
    assert all(
        labels[i] == labels[j] for i, p in enumerate(points) for j, q in enumerate(points) if p == q
    )


def test_the_largest_and_the_smallest_vectors_have_a_direction() -> None:
    """Their squares are beyond a double's range; they give the same point as (1, 1)."""
    for size in (5e-324, 1e-200, 1e200, 1.7e308):
        assert rounded([(size, size), (1.0, 1.0)]) == [(0.7071, 0.7071)] * 2


def test_entries_are_whole_numbers_of_ten_thousandths() -> None:
    """(3, 4) is .6 and .8; noise below 5e-5 is gone."""
    assert rounded([(3.0, 4.0), (3.00001, 3.99999), (0.0, 0.0)]) == [
        (0.6, 0.8),
        (0.6, 0.8),
        (0.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(1.0,), (1.0, 2.0)], r"of \[1, 2\] numbers"),
        ([(float("nan"), 1.0)], "not finite"),
        ([(float("inf"), 1.0)], "not finite"),
    ],
)
def test_unfit_vectors_are_refused(entries: list[tuple[float, ...]], message: str) -> None:
    """Vectors must have one size and finite numbers."""
    with pytest.raises(ValueError, match=message):
        rounded(entries)
