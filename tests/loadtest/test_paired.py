"""The paired interval: known cases, and properties that hold for any input."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.paired import bootstrap95, bootstrap95_by_group, differences

SOME = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=30)


def test_differences_are_gains_and_losses() -> None:
    """An item that only the first method has right is +1, only the second -1."""
    assert differences([True, True, False, False], [True, False, True, False]) == [0, 1, -1, 0]
    with pytest.raises(ValueError, match="argument 2"):
        differences([True], [True, False])


def test_equal_differences_are_certain() -> None:
    """Equal differences have an interval of one point."""
    assert bootstrap95([0.0] * 7) == [0.0, 0.0]
    assert bootstrap95([1.0]) == [1.0, 1.0]


def test_two_items_by_hand() -> None:
    """Means 0, 1/2 and 1 come with 1/4, 1/2 and 1/4: both ends are within the 95 %."""
    assert bootstrap95([0.0, 1.0]) == [0.0, 1.0]


def test_many_items_are_near_the_normal_interval() -> None:
    """40 of 400 gained: 0.1 -/+ 1.96 sqrt(0.1 x 0.9 / 400) = 0.0706 to 0.1294."""
    low, high = bootstrap95([1.0] * 40 + [0.0] * 360)
    assert low == pytest.approx(0.0706, abs=0.004)
    assert high == pytest.approx(0.1294, abs=0.004)


def test_groups_count_alike_and_keep_their_items() -> None:
    """Each group's values are equal, so that the mean of group means, 2, is certain too."""
    assert bootstrap95_by_group([[1.0] * 9, [3.0]]) == [2.0, 2.0]
    assert bootstrap95_by_group([[0.0, 1.0], [3.0]]) == [1.5, 2.0]


@given(SOME)
@settings(max_examples=25)
def test_the_interval_holds_the_mean_and_turns_with_the_sign(values: list[float]) -> None:
    """Low <= mean <= high; swapping the methods mirrors the interval."""
    low, high = bootstrap95(values)
    assert min(values) <= low <= fmean(values) <= high <= max(values)
    assert bootstrap95([-v for v in values]) == pytest.approx([-high, -low])


def test_no_items_is_an_error() -> None:
    """An empty list, or an empty group, is refused."""
    with pytest.raises(ValueError, match="at least one item"):
        bootstrap95([])
    with pytest.raises(ValueError, match="at least one item"):
        bootstrap95_by_group([[1.0], []])
