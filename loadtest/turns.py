"""Time several things fairly: in turns within one run, forwards and backwards."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds are: with one thread and nothing else running, both are the same."""


@dataclass(slots=True)
class Times(Generic[K]):
    """Seconds of every repeat, by what was timed, and what each call returned."""

    seconds: dict[K, list[float]] = field(default_factory=dict)
    outputs: dict[K, list[Any]] = field(default_factory=dict)

    def median(self, what: K) -> float:
        """The median over the repeats."""
        return statistics.median(self.seconds[what])

    def ratio(self, mine: K, base: K) -> float:
        """The median ratio of ``mine``'s time to ``base``'s, paired by repeat."""
        pairs = zip(self.seconds[mine], self.seconds[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def rates(self, what: K) -> list[float]:
        """Amounts a second by repeat, of calls that return amounts."""
        pairs = zip(self.outputs[what], self.seconds[what], strict=True)
        return [amount / seconds for amount, seconds in pairs]


async def in_turns(
    calls: Mapping[K, Callable[[], object]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    another: Callable[[], bool] = lambda: True,
) -> Times[K]:
    """Time each call once a repeat, every other repeat in the opposite order.

    What slows the machine for a while then slows neighbours alike. What a call returns is awaited
    if it can be. At least one repeat is made, at most ``repeats``, as long as ``another`` returns
    true between them.
    """
    times = Times[K]({what: [] for what in calls}, {what: [] for what in calls})
    for repeat in range(max(1, repeats)):
        if repeat and not another():
            break
        order = list(calls) if repeat % 2 == 0 else list(calls)[::-1]
        for what in order:
            start = clock()
            output = calls[what]()
            if inspect.isawaitable(output):
                output = await output
            times.seconds[what].append(clock() - start)
            times.outputs[what].append(output)
    return times
