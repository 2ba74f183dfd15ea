"""What the load part of the capacity check makes of what it saw, worked by hand."""

from __future__ import annotations

import pytest

from loadtest.capacity_load import (
    MOST,
    SHARES,
    Seen,
    grown,
    of_these,
    predicted,
    rows_of,
    seen,
)
from loadtest.company import Law, SearchSpan


def test_a_phase_by_hand() -> None:
    """Of ten seconds: two searches end in them, a third began; two samples lie in them."""
    spans = [SearchSpan(-1, 1), SearchSpan(2, 5), SearchSpan(8, 12)]
    samples = [(-1.0, 900.0), (1.0, 100.0), (10.0, 200.0), (11.0, 900.0)]
    found = seen(spans, samples, 0, 10)
    assert found == Seen(0.2, (1 + 3 + 2) / 10, 0.6, 2.5, 150, 0.2)


def test_a_phase_in_which_nothing_ended_is_an_error() -> None:
    """And says what there was."""
    with pytest.raises(ValueError, match=r"0 searches and 1 samples in 3 s"):
        seen([SearchSpan(1, 5)], [(1.0, 5.0)], 0, 3)


def test_a_prediction_by_hand() -> None:
    """Searches that cost each other nothing: two a second of half a second hold one's KV."""
    found = predicted(Law(fixed=0.5, each=0.0), 100, 2.0)
    assert found["under_way"] == pytest.approx(1)
    assert found["seconds"] == pytest.approx(0.5)
    assert found["kv_tokens"] == pytest.approx(100)
    assert found["answered"] == 2


def test_these_very_arrivals_by_hand() -> None:
    """Ten seconds less the first; two searches of two seconds that do not meet."""
    found = of_these(Law(fixed=1, each=1), 90, [2.0, 6.0], 10)
    assert found["under_way"] == found["busy"] == pytest.approx(4 / 9)
    assert found["kv_tokens"] == pytest.approx(40)
    assert found["seconds"] == 2
    assert found["answered"] == pytest.approx(2 / 9)


def test_errors_are_shares_of_what_was_measured() -> None:
    """A quarter too much; a half too little by these arrivals is no error of the prediction."""
    measured = Seen(2, 4, 0.8, 1, 100, 2)
    (found,) = rows_of("x", measured, {"under_way": 5.0}, {"under_way": 2.0})
    assert found == {
        "load": "x",
        "rate": 2,
        "what": "under_way",
        "predicted": 5,
        "measured": 4,
        "error": 0.25,
        "played": 2,
    }
    assert rows_of("x", measured, {"busy": 0.8})[0]["played"] is None


def test_the_picture_of_the_searches_by_hand() -> None:
    """Means over searches; a step's tokens are each search's own mean."""
    stats = [
        {"depth": 4, "nodes": 10, "generated_tokens": 100, "prompt_tokens": 20},
        {"depth": 6, "nodes": 20, "generated_tokens": 160, "prompt_tokens": 30},
    ]
    found = grown(stats)
    assert (found.depth, found.step, found.prompt) == (5, 9, 25)


def test_the_loads_that_are_predicted_can_be_kept_up_with() -> None:
    """And are none of those that are fitted."""
    assert all(0 < share < 1 for share in SHARES)
    assert MOST > 1
