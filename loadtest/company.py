"""How many searches are under way on a replica that they share, from how often one arrives.

A search in company is slower: with ``n`` under way each takes ``seconds(n)``, so that ``n /
seconds(n)`` end in a second. Arrivals are Poisson.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Company:
    """Means over time: searches ``at_once`` under way, those ``waiting`` for a place, and the share
    of the time that a replica is ``busy`` with at least one.
    """

    at_once: float
    waiting: float
    busy: float


def company(rate: Callable[[int], float], most: int, arrivals: float) -> Company:
    """The company on a replica that ends ``rate(n)`` searches a second with ``n`` under way, of
    which there are ``most`` while others wait; ``arrivals`` a second.

    Processor sharing whose speed depends on the number: ``P(n) = P(0) * product over k <= n of
    arrivals / rate(min(k, most))``, whatever the spread of the searches' sizes while none waits
    (F. P. Kelly, Reversibility and Stochastic Networks, 1979, section 3.3). Time follows by
    Little's law. Where ``seconds(n) = a + b * n`` and none waits this is, with ``load = arrivals *
    b``: ``at_once = arrivals * seconds(1) / (1 - load)``, ``busy = 1 - (1 - load) ** (seconds(1) /
    b)``. Raises ValueError if the replica cannot keep up.
    """
    load = arrivals / rate(most)
    if load >= 1:
        raise ValueError(f"{arrivals:.3g} a second arrive, {rate(most):.3g} are the most that end")
    logs = [0.0]
    for under_way in range(1, most + 1):
        logs.append(logs[-1] + math.log(arrivals / rate(under_way)))
    top = max(logs)
    chances = [math.exp(value - top) for value in logs]  # a product may not fit a float
    queued = chances[-1] * load / (1 - load)
    total = sum(chances) + queued
    growing = sum(n * chance for n, chance in enumerate(chances)) + most * queued
    return Company(growing / total, queued / (1 - load) / total, 1 - chances[0] / total)


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


def law_through(alone: float, most: int, full: float) -> Law:
    """From the rate of one search after the other, and the rate of ``most`` at once."""
    each = (most / full - 1 / alone) / (most - 1)
    return Law(1 / alone - each, each)


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
