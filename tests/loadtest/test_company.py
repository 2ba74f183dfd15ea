"""Searches that share a replica: what theory says, by hand and against a simulation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.capacity import company
from loadtest.served import poisson


@dataclass(frozen=True, slots=True)
class Law:
    """``seconds(n) = fixed + each * n``: the cost of passes, which all share, and that of each
    search's rows.
    """

    fixed: float
    each: float

    def seconds(self, at_once: float) -> float:
        """Of a search among so many."""
        return self.fixed + self.each * at_once

    def rate(self, at_once: float) -> float:
        """Searches that end in a second."""
        return at_once / self.seconds(at_once)


@dataclass(frozen=True, slots=True)
class SearchSpan:
    """When a search arrived and when it was answered, in seconds of one clock."""

    begin: float
    end: float


def played(arrivals: Sequence[float], seconds: Callable[[int], float]) -> list[SearchSpan]:
    """What ``seconds`` says of these very arrivals, in order, if all searches are of one size: each
    gets ``1 / seconds(n)`` of itself done in a second. ``company`` is the mean over all chances.
    """
    spans: list[SearchSpan] = []
    under_way: deque[tuple[float, float]] = deque()  # its arrival, and what is done when it ends
    now = done = 0.0
    for arrival in (*arrivals, math.inf):
        while under_way:
            slow = seconds(len(under_way))
            ends = now + (under_way[0][1] - done) * slow
            if ends > arrival:
                done += (arrival - now) / slow
                break
            begin, done = under_way.popleft()
            now = ends
            spans.append(SearchSpan(begin, ends))
        now = arrival
        under_way.append((arrival, done + 1))
    return spans


def mean_under_way(spans: Sequence[SearchSpan], begin: float, end: float) -> float:
    """Searches asked and not answered between two times, on average over the time."""
    return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans) / (end - begin)


def busy_share(spans: Sequence[SearchSpan], begin: float, end: float) -> float:
    """The share of the time between two in which at least one is under way."""
    covered, until = 0.0, begin
    for span in sorted(spans, key=lambda each: each.begin):
        start, stop = max(span.begin, until), min(span.end, end)
        if stop > start:
            covered += stop - start
            until = stop
    return covered / (end - begin)


def test_sharing_that_gains_nothing_is_a_queue() -> None:
    """At half load of one search a second: one under way on average, busy half of the time."""
    found = company(lambda _: 1.0, 1, 0.5)
    assert found.at_once == pytest.approx(0.5)
    assert found.waiting == pytest.approx(0.5)
    assert found.busy == pytest.approx(0.5)
    shared = company(lambda _: 1.0, 5, 0.5)
    assert shared.at_once + shared.waiting == pytest.approx(1)
    assert shared.waiting == pytest.approx(0.5**5)


def test_sharing_that_costs_nothing_is_each_alone() -> None:
    """Two a second that take one second each: two under way, none in one of e squared moments."""
    found = company(float, 200, 2)
    assert found.at_once == pytest.approx(2)
    assert found.busy == pytest.approx(1 - math.exp(-2))


def test_shared_passes_by_hand() -> None:
    """4 s alone, 3 of them shared; at half load 0.5 * 4 / 0.5 are under way."""
    found = company(Law(fixed=3, each=1).rate, 400, 0.5)
    assert found.at_once == pytest.approx(4)
    assert found.waiting == pytest.approx(0, abs=1e-9)
    assert found.busy == pytest.approx(1 - 0.5**4)


def test_very_many_places_fit_the_arithmetic() -> None:
    """Products of thousands of factors above 1 stay numbers."""
    found = company(float, 5000, 2000)
    assert found.at_once == pytest.approx(2000)
    assert found.busy == pytest.approx(1)


def test_more_than_it_can_do_is_refused() -> None:
    """Both rates are named."""
    with pytest.raises(ValueError, match="2 a second arrive, 1 are the most that end"):
        company(lambda _: 1.0, 4, 2.0)


@given(st.floats(0, 10), st.floats(0.01, 10), st.integers(1, 64), st.floats(0.01, 0.9))
def test_more_arrivals_are_never_less_company(
    fixed: float, each: float, most: int, load: float
) -> None:
    """And no search is quicker than one alone."""
    law = Law(fixed, each)
    arrivals = load * law.rate(most)
    few, many = (company(law.rate, most, share * arrivals) for share in (0.5, 1.0))
    assert few.at_once <= many.at_once <= most
    assert few.busy <= many.busy <= 1
    assert (few.at_once + few.waiting) / (0.5 * arrivals) >= law.seconds(1) * (1 - 1e-9)


def test_two_that_meet_by_hand() -> None:
    """The first is half done when the second comes; from then on both go at half speed."""
    assert played([0, 0.5], float) == [SearchSpan(0, 1.5), SearchSpan(0.5, 2)]
    assert played([0, 5], float) == [SearchSpan(0, 1), SearchSpan(5, 6)]
    assert played([], float) == []


def test_what_is_played_for_long_is_what_theory_says() -> None:
    """With searches of one size, although the product is usually shown for random ones."""
    law, end = Law(fixed=0.4, each=0.2), 20000.0
    spans = played(poisson(2.5, end), law.seconds)
    said = company(law.rate, 400, 2.5)
    assert mean_under_way(spans, 0, end) == pytest.approx(said.at_once, rel=0.05)
    assert busy_share(spans, 0, end) == pytest.approx(said.busy, rel=0.05)


def test_means_over_a_window_by_hand() -> None:
    """Of 4 seconds: one, two, one, none; what lies outside does not count."""
    spans = [SearchSpan(-1, 2), SearchSpan(1, 3), SearchSpan(1.5, 2), SearchSpan(9, 10)]
    assert mean_under_way(spans, 0, 4) == (2 + 2 + 0.5) / 4
    assert busy_share(spans, 0, 4) == 0.75
    assert busy_share([], 0, 4) == 0
