"""The hostile run: each of its checks can fail, and its request bodies are deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.hostile.__main__ import row
from loadtest.hostile.bodies import body
from loadtest.hostile.history import HUNG, Asked, StageHistory, checked
from loadtest.hostile.searches import drawn
from search.spec import SearchSpec

FINE = [
    Asked("a", 200, "", "d1", 7, 7),
    Asked("a", 200, "", "d1", 7, 7),
    Asked("b", 503, "engine_unavailable"),
    Asked("b", 400, "invalid_value"),
]


def test_a_history_that_keeps_every_promise() -> None:
    """There is one pair of equal requests, since errors make no pair."""
    summary = checked(FINE)
    assert (summary["requests"], summary["pairs"], summary["broken"]) == (4, 1, {})


def test_what_a_deadline_has_cut_is_no_pair() -> None:
    """A search's progress at its deadline depends on the clock; it is counted separately."""
    timed_out = Asked("a", 200, "", "d2", 5, 5, 60.0, deadline=True)
    summary = checked([*FINE, timed_out])
    assert (summary["pairs"], summary["cut_by_deadline"], summary["broken"]) == (1, 1, {})


@pytest.mark.parametrize(
    ("reply", "broken"),
    [
        (Asked("c", 500, "internal_error"), "undocumented_5xx"),
        (Asked("c", 400), "untyped_errors"),
        (Asked("c", HUNG), "hung"),
        (Asked("c", 0), "lost"),
        (Asked("a", 200, "", "d2", 7, 7), "digests_differ"),
        (Asked("c", 200, "", "d1", 8, 7), "billed_is_not_drawn"),
    ],
)
def test_a_promise_that_breaks_is_named(reply: Asked, broken: str) -> None:
    """Each kind of breach is reported alone, under its own name."""
    assert checked([*FINE, reply], answers=True)["broken"] == {broken: 1}


def test_a_row_says_what_was_broken_and_nothing_else() -> None:
    """The row has each breach under its name, and counts it in the column it belongs to."""
    fine = row("pairs", checked(FINE))
    assert (fine["kind"], fine["cases"], fine["broken"]) == ("pairs", len(FINE), "nothing")
    assert fine["found"]["pairs"] == 1
    bad = row("pairs", checked([*FINE, Asked("c", 500, "internal_error"), Asked("d", 0)]))
    assert bad["broken"] == {"undocumented_5xx": 1, "lost": 1}
    assert (bad["errors_5xx"], bad["lost"], bad["wrong"], bad["hung"]) == (1, 1, 0, 0)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    """Whole lines on disk are read back; half a line is ignored."""
    history = StageHistory(tmp_path / "state", "stage")
    assert history.read() == []
    history.add(FINE)
    with (tmp_path / "state" / "stage.jsonl").open("a") as file:
        file.write('{"sent": "hal')
    assert history.read() == FINE


@pytest.mark.slow
def test_what_is_asked_is_the_same_each_time() -> None:
    """Bodies and searches are deterministic, and the searches are valid."""
    for number in range(40):
        assert body(number) == body(number)
        assert drawn(number) == drawn(number)
        SearchSpec(**drawn(number)["search"])
