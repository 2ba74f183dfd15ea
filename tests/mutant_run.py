"""A pytest plug-in for ``make mutants``: how the tests of one mutant run.

Those that are most likely to notice it come first, since the first failure ends the run: the
module's own test files, then the tests that were quick when mutmut measured them. A test that takes
far longer than it did then is endless, and its process dies of SIGPROF. What counts is its own CPU
time, or the time in which it is idle; wall-clock time also depends on the machine's other load.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

SECONDS, TIMES = 10, 10
"""A test may run, and be idle, for SECONDS plus TIMES its unmutated duration."""

MEMORY = 2 << 30
"""Bytes a mutant may allocate: an endless loop that appends gets a MemoryError, which kills it."""


def module_of_mutant() -> str | None:
    """The mutated module's name without its package; None where mutmut is not testing a mutant."""
    mutant = os.environ.get("MUTANT_UNDER_TEST", "")
    return mutant.split(".")[-2] if "." in mutant else None


@functools.cache
def durations() -> dict[str, float]:
    """Seconds that each test took unmutated."""
    return json.loads(Path("mutmut-stats.json").read_text())["duration_by_test"]


def pytest_configure() -> None:
    """Limit a mutant's memory."""
    if module_of_mutant():
        status = Path("/proc/self/status").read_text()
        allocated = int(status.partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (allocated + MEMORY, allocated + MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the module's own test files first, and within each group the quick tests first."""
    if module := module_of_mutant():
        stem, seconds = f"test_{module}", durations()
        items.sort(key=lambda i: (not i.path.stem.startswith(stem), seconds.get(i.nodeid, 0.0)))


def pytest_collection_finish() -> None:
    """Exempt collected tests, which mutmut's forks inherit, from garbage collection."""
    gc.freeze()


def idle() -> float:
    """Seconds, from an arbitrary start, in which the main thread neither ran nor was runnable."""
    running, runnable, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    return time.monotonic() - (running + runnable) / 1e9


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Start the test's two timers: of idle time and of CPU time."""
    if module_of_mutant():
        most, start = SECONDS + TIMES * durations().get(nodeid, 0.0), idle()

        def look(*_: object) -> None:
            if idle() - start > most:
                os.kill(os.getpid(), signal.SIGPROF)

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, most, 1.0)
        signal.setitimer(signal.ITIMER_PROF, most)
