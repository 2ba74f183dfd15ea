"""How many threads a model's passes are fastest with on this machine, found by timing some.

Small passes may lose by a second thread: what a thread would do is less than waking it costs, and
two processors may be two halves of one core. Exact arithmetic does not depend on the choice.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from runtime.embedded.model.forward import Forward, Span
from runtime.embedded.model.threads import Threads

_LOG = logging.getLogger(__name__)

ROWS = (1, 16, 64)
CONTEXT = 64
REPEATS = 5
"""Of which the fastest counts: what else the machine does only adds time."""
LONG_SECONDS = 0.1
"""A decode pass of one row that takes this long is of a model that all threads are needed for."""
WORTH = 1.05
"""How much faster more threads must be: what does not need a processor leaves it to others."""


def fastest_threads(
    forward: Forward, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> Threads:
    """Let ``forward`` decode with each of ``counts``, in turn, and go on with the fastest.

    For passes of 1, 16 and 64 sequences, and what is between, it is the fewest threads that none
    of the other counts beats by ``WORTH``. ``forward`` must have been made for these counts.
    """
    most, store = max(counts), forward.new_store(max(ROWS) * CONTEXT)
    last = np.zeros(1, dtype=np.int64)
    spans = [
        Span(last, CONTEXT - 1, row * CONTEXT + np.arange(CONTEXT), 0) for row in range(max(ROWS))
    ]

    def seconds(rows: int) -> float:
        before = clock()
        forward.run(spans[:rows], store)
        return clock() - before

    forward.threads = Threads.same(most)
    seconds(1)
    if len(counts) == 1 or seconds(1) > LONG_SECONDS:
        return forward.threads
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for count in counts:
            forward.threads = Threads.same(count)
            seconds(1)  # wakes the threads
            for rows in ROWS:
                taken[rows, count].append(seconds(rows))
    costs = {of: min(times) for of, times in taken.items()}
    forward.threads = Threads.rising([(rows, _enough(costs, rows, counts)) for rows in ROWS])
    shown = ", ".join(
        f"{count}: {' '.join(f'{1e3 * costs[rows, count]:.1f}' for rows in ROWS)}"
        for count in counts
    )
    _LOG.info("threads: %s; ms of %s rows by threads: %s", forward.threads, ROWS, shown)
    return forward.threads


def _enough(costs: Mapping[tuple[int, int], float], rows: int, counts: Sequence[int]) -> int:
    """The fewest threads that no others beat by ``WORTH`` in passes of so many rows."""
    best = min(costs[rows, count] for count in counts)
    return min(count for count in counts if costs[rows, count] <= WORTH * best)
