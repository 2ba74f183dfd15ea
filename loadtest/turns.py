"""Timing several things fairly: in turns within one run, forwards and backwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Times(Generic[K]):
    """Seconds of every repeat, by what was timed."""

    seconds: dict[K, list[float]] = field(default_factory=dict)

    def median(self, what: K) -> float:
        """The median over the repeats."""
        return statistics.median(self.seconds[what])

    def ratio(self, one: K, other: K) -> float:
        """The median over the repeats of one's time over the other's, each pair of one repeat."""
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


async def in_turns(
    calls: Mapping[K, Callable[[], Awaitable[object]]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    another: Callable[[], bool] = lambda: True,
) -> Times[K]:
    """Time each call once a repeat, every other repeat in the opposite order.

    What slows the machine for a while then slows neighbours alike. At least one repeat is made, at
    most ``repeats``, as long as ``another`` says so between them.
    """
    times = Times[K]({what: [] for what in calls})
    for repeat in range(max(1, repeats)):
        if repeat and not another():
            break
        order = list(calls) if repeat % 2 == 0 else list(calls)[::-1]
        for what in order:
            start = clock()
            await calls[what]()
            times.seconds[what].append(clock() - start)
    return times
