"""How many threads a pass computes with: what has lately been fastest for passes of its size.

Exact arithmetic does not depend on the choice. A second thread may halve a large pass, cost a small
one more than it wins, and cost every pass where other work wants the processors: the thread that is
done waits for the one that is kept from its core. Which it is changes with the load: slowly, which
short trials find out, and at once, which a pass shows that was held up.
"""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOG = logging.getLogger(__name__)

TURN_PASSES = 4
"""Passes in a row with one number of threads; the first wakes them and is not counted."""
TURNS = 2
"""Of each number in a trial, in turns: load that comes and goes meets all of them."""
SOONEST, LATEST = 64, 512
"""Passes until the next trial, doubled each time that nothing has changed."""
LEAST_SPEEDUP = 1.05
"""How much faster more threads must be: what does not need a processor leaves it to others."""
STALL = 2.0
"""A pass that took so many times what passes of its size lately took, and lost a core meanwhile."""
LATELY, LEAST_LATELY = 16, 4
"""Passes that "lately" is the median of, and without which it is not known."""
YIELDED = 32
"""Passes with the fewest threads after a stall."""


def _preemptions() -> int:
    """How often a thread of this process had to leave a core that it still wanted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class ThreadTuner:
    """Chooses among ``counts`` of threads for each size of pass, again and again, by short trials.

    Sizes are powers of two of a pass's rows. A trial runs passes that are wanted anyway with the
    number chosen so far and its neighbours; the fewest threads win that none beats by
    ``LEAST_SPEEDUP``. After a stall the next ``YIELDED`` passes leave the cores to whoever came, if
    the first of that size is faster so.
    """

    def __init__(
        self,
        counts: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        preemptions: Callable[[], int] = _preemptions,
    ) -> None:
        """Raises ValueError for a count below 1."""
        for count in counts:
            if count < 1:
                raise ValueError(f"threads: {count}; at least 1 is needed")
        self.counts = tuple(sorted(set(counts)))
        self._clock = clock
        self._preemptions = preemptions
        self._sizes: dict[int, _Size] = {}
        self._yielded = 0

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
        yielding = self._yielded > 0
        count = self.counts[0] if yielding else size.next(self.counts)
        preempted, began = self._preemptions(), self._clock()
        yield count
        seconds = (self._clock() - began) / max(1, rows)
        if yielding:
            self._yielded = 0 if size.slower_than_stalled(seconds) else self._yielded - 1
            return
        size.took(count, seconds)
        if count > self.counts[0] and size.stalled(seconds) and self._preemptions() > preempted:
            size.stall, self._yielded = seconds, YIELDED
        if size.trial_over:
            before = size.chosen
            size.settle()
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

    ``lately``: seconds a row of those with the chosen number of threads; ``stall``: of the one that
    was held up, until a pass with fewer threads is compared to it.
    """

    chosen: int
    pause: int = SOONEST // 2
    wait: int = 0
    left: list[int] = field(default_factory=list)
    taken: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    stall: float | None = None

    @property
    def trial_over(self) -> bool:
        return not self.left and bool(self.taken)

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

    def took(self, count: int, seconds_a_row: float) -> None:
        """How long it took, if it was part of a trial."""
        if self.left:
            if len(self.left) % TURN_PASSES:
                self.taken[count].append(seconds_a_row)
            self.left.pop(0)
        if count == self.chosen:
            self.lately.append(seconds_a_row)

    def stalled(self, seconds_a_row: float) -> bool:
        """Whether a pass with the chosen threads was held up, for all that is known."""
        if self.left or len(self.lately) < LEAST_LATELY:
            return False
        return seconds_a_row > STALL * statistics.median(self.lately)

    def slower_than_stalled(self, seconds_a_row: float) -> bool:
        """Whether fewer threads were no help after a stall: what is long is then the pass."""
        stall, self.stall = self.stall, None
        if stall is None or seconds_a_row < stall:
            return False
        self.lately.clear()
        return True

    def settle(self) -> None:
        """Choose, and wait for longer if nothing has changed."""
        costs = {count: statistics.median(times) for count, times in self.taken.items()}
        best = min(costs.values())
        chosen = min(count for count, cost in costs.items() if cost <= LEAST_SPEEDUP * best)
        self.pause = min(2 * self.pause, LATEST) if chosen == self.chosen else SOONEST
        if chosen != self.chosen:
            self.lately.clear()
        self.chosen, self.wait = chosen, self.pause
        self.taken.clear()


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts to choose from: the powers of two below ``most``, and ``most``."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)
