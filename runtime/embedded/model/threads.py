"""How many threads a pass computes with: what has lately been fastest for passes of its size.

Exact arithmetic does not depend on the choice. A second thread may halve a large pass, cost a small
one more than it wins, and cost every pass where other work wants the processors: the thread that is
done waits for the one that is kept from its core. Which it is changes with the load: slowly, which
short trials find out, and at once, which a pass shows that is held up.
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
"""Passes in a row with one number of threads; the first wakes them and is not counted."""
TURNS = 2
"""Of each number in a trial, in turns: load that comes and goes meets all of them."""
RETRY, SOONEST, LATEST = 8, 64, 512
"""Passes until the next trial, after a choice of fewer threads and of more, doubled each time that
nothing has changed: one slow pass is soon forgiven, a core that stays taken is not."""
LEAST_SPEEDUP = 1.05
"""How much faster more threads must be: what does not need a processor leaves it to others."""
HELD_UP = 2.0
"""How many times what the fewest threads take a pass of a trial takes that ends it."""
WEIGHT = 1 / 4
"""Of a pass in the running mean of what its number of threads costs."""


class ThreadTuner:
    """Chooses among ``counts`` of threads for each size of pass, again and again, by short trials.

    Sizes are powers of two of a pass's rows. A trial runs passes that are wanted anyway with the
    number chosen so far and its neighbours; the fewest threads win that none beats by
    ``LEAST_SPEEDUP``. Between trials a running mean of the chosen number's cost is compared to what
    the others came to, so that a pass that somebody held up counts before the next trial.
    """

    def __init__(
        self, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``counts``: 1 or more each."""
        self.counts = tuple(sorted(set(counts)))
        self._clock = clock
        self._sizes: dict[int, _Size] = {}

    def at(self, rows: int) -> int:
        """What is chosen for a pass of so many rows."""
        return self._size(rows).chosen

    @contextmanager
    def timed(self, rows: int) -> Iterator[int]:
        """The threads for the pass of ``rows`` rows that runs in this context."""
        if len(self.counts) == 1:
            yield self.counts[0]
            return
        size = self._size(rows)
        count = size.next(self.counts)
        began = self._clock()
        yield count
        before = size.chosen
        size.record(count, (self._clock() - began) / max(1, rows))
        if size.chosen != before:
            least = 1 << max(0, rows.bit_length() - 1)
            _LOG.debug("passes from %d rows on: %d threads", least, size.chosen)

    def _size(self, rows: int) -> _Size:
        bits = rows.bit_length()
        if bits not in self._sizes:
            self._sizes[bits] = _Size(self.counts[-1])
        return self._sizes[bits]


@dataclass(slots=True)
class _Size:
    """Passes of one size: ``wait`` of them until the next trial, ``left`` to run of the present.

    ``measured``: seconds a row, by threads, in the trial; ``cost``: what they come to by now.
    """

    chosen: int
    pause: int = SOONEST // 2
    wait: int = 0
    left: list[int] = field(default_factory=list)
    measured: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    cost: dict[int, float] = field(default_factory=dict)

    def next(self, counts: tuple[int, ...]) -> int:
        """The threads of the next pass."""
        if not self.left:
            if self.wait:
                self.wait -= 1
                return self.chosen
            place = counts.index(self.chosen)
            tried = counts[max(0, place - 1) : place + 2]
            self.left = [count for _ in range(TURNS) for count in tried for _ in range(TURN_PASSES)]
        return self.left[0]

    def record(self, count: int, seconds_a_row: float) -> None:
        """How long it took; choose by it."""
        if self.left:
            self._tried(count, seconds_a_row)
        elif count in self.cost:
            self.cost[count] += WEIGHT * (seconds_a_row - self.cost[count])
            if self._cheapest() != self.chosen:
                self._choose()

    def _tried(self, count: int, seconds_a_row: float) -> None:
        """A pass of a trial, which ends with the last, or with one that is held up."""
        if len(self.left) % TURN_PASSES:
            self.measured[count].append(seconds_a_row)
        self.left.pop(0)
        fewest = min(self.measured, default=count)
        if count > fewest and seconds_a_row > HELD_UP * statistics.median(self.measured[fewest]):
            self.measured[count].append(seconds_a_row)
            self.left.clear()
            self._settle(max)
        elif not self.left:
            self._settle(statistics.median)

    def _settle(self, middle: Callable[[list[float]], float]) -> None:
        """End the trial and choose by it."""
        self.cost = {count: middle(times) for count, times in self.measured.items()}
        self._choose()
        self.measured.clear()

    def _choose(self) -> None:
        """What is cheapest by now, until the next trial."""
        chosen = self._cheapest()
        if chosen == self.chosen:
            self.pause = min(2 * self.pause, LATEST)
        else:
            self.pause = RETRY if chosen < self.chosen else SOONEST
        self.chosen, self.wait = chosen, self.pause

    def _cheapest(self) -> int:
        best = min(self.cost.values())
        return min(count for count, cost in self.cost.items() if cost <= LEAST_SPEEDUP * best)


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts to choose from: the powers of two below ``most``, and ``most``."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)
