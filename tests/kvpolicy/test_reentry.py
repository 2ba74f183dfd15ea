"""Rows recorded of a search: blocks that left the path, whether they came back, their signals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.fit import fit, losses, together
from kvpolicy.reentry import ReentryRecorder
from kvpolicy.value import UNFITTED

NAN = math.nan


def followed() -> ReentryRecorder:
    """A recorder after three rounds: at the root; at 1, leaving 2 and 3; at 2, leaving 3, 4 and 5,
    with 4 and 3 as the outlook and 5 dead."""
    search = ReentryRecorder(7)
    search.transition({}, [0], [])
    search.boundary(1, 0, 10, 0.9, (0.5, 0.6))
    search.boundary(2, 0, 20, 0.8, (0.7, 0.4))
    search.boundary(3, 0, 30, None)
    search.transition({1: 0.9, 2: 0.5, 3: 0.1}, [1], [])
    search.boundary(4, 1, 40, 0.3, (0.1, 0.2, 0.8))
    search.boundary(5, 1, 50, 0.2, (0.1, 0.2))
    search.transition({4: 0.4}, [2], [5], (4, 3))
    return search


def test_rows_by_hand() -> None:
    """Of the blocks left at the second transition 2 comes back, 3 does not; later none does.

    The root and 1 are inner blocks, whose own score does not count; 5 is dead. v of the third
    transition follows the outlook.
    """
    rows = followed().rows()
    table = np.stack([rows.v, rows.u, rows.a, rows.target, rows.weight], axis=1)
    expected = [
        [0.5, 0.8, 0.4, 1.0, 20.0],
        [0.1, NAN, NAN, 0.0, 30.0],
        [0.5, NAN, NAN, 0.0, 30.0],
        [1.0, 0.3, 0.8, 0.0, 40.0],
    ]
    np.testing.assert_allclose(table, expected)


def test_a_block_is_left_again_each_time() -> None:
    """Over the moves 1, 2, 1, 1 a block gives a row for each transition that it is off the path."""
    search = ReentryRecorder(5)
    search.boundary(1, 0, 10)
    search.boundary(2, 0, 10)
    for node in (1, 2, 1, 1):
        search.transition({1: 0.5, 2: 0.5}, [node], [])
    rows = search.rows()
    assert rows.target.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert rows.v.tolist() == [0.5] * 4


def test_a_block_that_died_before_it_closed_says_nothing() -> None:
    """A dead block adds neither a row of its own nor attention to other blocks."""
    search, other = followed(), followed()
    for recorder in (search, other):
        recorder.transition({}, [4], [9])
    search.boundary(9, 4, 10, 0.5, (0.9, 0.9, 0.9))
    for recorder in (search, other):
        recorder.transition({}, [3], [])
    assert repr(search.rows()) == repr(other.rows())


def test_a_search_that_leaves_nothing_has_no_rows() -> None:
    """Without rows a fit is refused."""
    search = ReentryRecorder(5)
    search.transition({}, [0], [])
    rows = search.rows()
    assert len(rows.target) == 0
    with pytest.raises(ValueError, match="rows: none"):
        fit(rows, "exact")


def test_what_is_fitted_says_more_than_the_share_that_came_back() -> None:
    """Losses are by set, over the same rows; the set "u" has less loss than the bias alone."""
    rows = together([followed().rows(), followed().rows()])
    assert len(rows.target) == 8
    theta = fit(rows, "exact")
    assert theta.signals == "vua"
    loss_by_set = losses(theta, rows)
    assert list(loss_by_set) == list(theta.sets)
    assert loss_by_set["u"] < loss_by_set[""]
    bias, share = theta.sets[""][0], 20 / 60
    assert loss_by_set[""] == pytest.approx(np.logaddexp(0, bias) - share * bias)
    assert losses(UNFITTED, ReentryRecorder(3).rows()) == {}
    assert losses(theta, rows._replace(weight=rows.weight / 1000)) == pytest.approx(loss_by_set)


@given(
    parents=st.lists(st.integers(0, 10**6), min_size=1, max_size=25),
    moves=st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
)
def test_what_came_back_is_what_a_later_path_holds(parents: list[int], moves: list[int]) -> None:
    """Rows match the definition, path by path; blocks on the current path give no rows."""
    above = {node: draw % node for node, draw in enumerate(parents, start=1)}
    search = ReentryRecorder(3)
    for node, parent in above.items():
        search.boundary(node, parent, node)
    paths = []
    for draw in moves:
        leaf = draw % (len(parents) + 1)
        search.transition({}, [leaf], [])
        path = {0}
        while leaf:
            path.add(leaf)
            leaf = above[leaf]
        paths.append(path)
    leaves = [node for node in above if node not in above.values()]
    expected = [
        (float(any(node in later for later in paths[at + 1 :])), float(node))
        for at, path in enumerate(paths)
        for node in leaves
        if node not in path
    ]
    rows = search.rows()
    assert list(zip(rows.target.tolist(), rows.weight.tolist(), strict=True)) == expected
