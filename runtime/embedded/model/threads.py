"""How many threads a model's passes are fastest with on this machine, found by timing some.

Small passes may lose by a second thread: what a thread would do is less than waking it costs, and
two processors may be two halves of one core. Exact arithmetic does not depend on the choice.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from runtime.embedded.model.forward import Forward, Span

_LOG = logging.getLogger(__name__)

ROWS = (1, 16, 64)
CONTEXT = 64
REPEATS = 3
LONG_SECONDS = 0.1
"""A decode pass of one row that takes this long is of a model that all threads are needed for."""
WORTH = 1.05
"""How much faster more threads must be: what does not need a processor leaves it to others."""


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts to choose from: the powers of two below ``most``, and ``most``."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


def fastest_threads(
    forward: Forward, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> int:
    """Let ``forward`` decode with each of ``counts``, in turn, and go on with the fastest.

    Passes of 1, 16 and 64 sequences count alike. Returns the choice: the fewest threads that none
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

    forward.threads = most
    seconds(1)
    if len(counts) == 1 or seconds(1) > LONG_SECONDS:
        return most
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for count in counts:
            forward.threads = count
            seconds(1)  # wakes the threads
            for rows in ROWS:
                taken[count, rows].append(seconds(rows))
    costs = {
        count: sum(math.log(median(taken[count, rows])) for rows in ROWS) / len(ROWS)
        for count in counts
    }
    enough = min(costs.values()) + math.log(WORTH)
    forward.threads = min(count for count in counts if costs[count] <= enough)
    shown = ", ".join(f"{count}: {1e3 * math.exp(costs[count]):.1f}" for count in counts)
    _LOG.info("%d threads; milliseconds a pass by threads: %s", forward.threads, shown)
    return forward.threads
