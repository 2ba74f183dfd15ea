"""How many threads a pass computes with: the number that was lately fastest for passes of its size.

Exact arithmetic does not depend on the choice. A second thread may halve the time of a large pass,
cost a small one more than it gains, and slow every pass down while other work needs the cores: the
thread that is done waits for the one that does not get its core. The best number changes with the
load: slowly, which short trials find out, or at once, which shows in a single slow pass.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOG = logging.getLogger(__name__)

TURN_PASSES = 4
"""Passes in a row with one number of threads; the first wakes the threads and is not counted."""
TURNS = 2
"""Turns of each number in a trial, so that load that comes and goes meets all numbers."""
RETRY, SOONEST, LATEST = 8, 64, 512
"""Passes until the next trial after choosing fewer threads, after more, and at most: the pause is
doubled each time that nothing changes. One slow pass is soon forgiven, a core that stays busy not.
"""
LEAST_SPEEDUP = 1.05
"""How many times as fast more threads must be; else the cores are left to other processes."""
HELD_UP = 2.0
"""A trial ends if a pass takes this many times what the fewest threads take."""
WEIGHT = 1 / 4
"""Weight of a pass in the running mean of the cost of its number of threads."""


class ThreadTuner:
    """Chooses among ``counts`` of threads for each size of pass, again and again, by short trials.

    Sizes are powers of two of a pass's rows. A trial runs passes that are due anyway with the
    number chosen so far and its neighbours; the fewest threads that no other number beats by
    ``LEAST_SPEEDUP`` win. Between trials a running mean of the chosen number's cost is compared to
    the costs of the others, so that a slow pass counts before the next trial.
    """

    def __init__(
        self, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``counts``: numbers of threads, each 1 or more."""
        self.counts = tuple(sorted(set(counts)))
        self._clock = clock
        self._sizes: dict[int, _Size] = {}

    def at(self, rows: int) -> int:
        """The number of threads chosen for a pass of ``rows`` rows."""
        return self._size(rows).threads

    @contextmanager
    def timed(self, rows: int) -> Iterator[int]:
        """Yield the number of threads for a pass of ``rows`` rows, and time the ``with`` block."""
        if len(self.counts) == 1:
            yield self.counts[0]
            return
        size = self._size(rows)
        count = size.next(self.counts)
        start = self._clock()
        yield count
        before = size.threads
        size.record(count, (self._clock() - start) / max(1, rows))
        if size.threads != before:
            least = 1 << max(0, rows.bit_length() - 1)
            _LOG.debug("passes from %d rows on: %d threads", least, size.threads)

    def _size(self, rows: int) -> _Size:
        bits = rows.bit_length()
        if bits not in self._sizes:
            self._sizes[bits] = _Size(self.counts[-1])
        return self._sizes[bits]


@dataclass(slots=True)
class _Size:
    """Passes of one size: ``threads`` chosen, ``wait`` passes until the next trial, ``trial``: the
    threads of the current trial's remaining passes. ``timings``: seconds per row in the trial, by
    number of threads; ``cost``: the current cost of each number.
    """

    threads: int
    pause: int = SOONEST // 2
    wait: int = 0
    trial: list[int] = field(default_factory=list)
    timings: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    cost: dict[int, float] = field(default_factory=dict)

    def next(self, counts: tuple[int, ...]) -> int:
        """The threads of the next pass."""
        if not self.trial:
            if self.wait:
                self.wait -= 1
                return self.threads
            place = counts.index(self.threads)
            near = counts[max(0, place - 1) : place + 2]
            self.trial = [count for _ in range(TURNS) for count in near for _ in range(TURN_PASSES)]
        return self.trial[0]

    def record(self, count: int, seconds_a_row: float) -> None:
        """Record a pass's time, and choose again if it changes what is cheapest."""
        if self.trial:
            self._record_trial(count, seconds_a_row)
        elif count in self.cost:
            self.cost[count] += WEIGHT * (seconds_a_row - self.cost[count])
            if self._cheapest() != self.threads:
                self._choose()

    def _record_trial(self, count: int, seconds_a_row: float) -> None:
        """Record a pass of a trial, which ends with its last pass or with a very slow one."""
        if len(self.trial) % TURN_PASSES:
            self.timings[count].append(seconds_a_row)
        self.trial.pop(0)
        fewest = min(self.timings, default=count)
        if count > fewest and seconds_a_row > HELD_UP * statistics.median(self.timings[fewest]):
            self.timings[count].append(seconds_a_row)
            self.trial.clear()
            self._settle(max)
        elif not self.trial:
            self._settle(statistics.median)

    def _settle(self, middle: Callable[[list[float]], float]) -> None:
        """End the trial and choose by its times."""
        self.cost = {count: middle(times) for count, times in self.timings.items()}
        self._choose()
        self.timings.clear()

    def _choose(self) -> None:
        """Choose the cheapest number until the next trial."""
        cheapest = self._cheapest()
        if cheapest == self.threads:
            self.pause = min(2 * self.pause, LATEST)
        else:
            self.pause = RETRY if cheapest < self.threads else SOONEST
        self.threads, self.wait = cheapest, self.pause

    def _cheapest(self) -> int:
        best = min(self.cost.values())
        return min(count for count, cost in self.cost.items() if cost <= LEAST_SPEEDUP * best)


def thread_counts(most: int) -> tuple[int, ...]:
    """Numbers of threads to choose from: the powers of two below ``most``, and ``most``."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)
