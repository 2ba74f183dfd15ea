"""Processes of a test, found by a mark in their environment, whichever process started them."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "TEST_PROCESSES"


@contextmanager
def marked() -> Iterator[MarkedProcesses]:
    """Yield a new mark for processes, and kill those that are left afterwards."""
    processes = MarkedProcesses()
    try:
        yield processes
    finally:
        for pid in processes.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class MarkedProcesses:
    """The processes whose environment has this mark, without zombies."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """Our environment with the mark, which child processes inherit."""
        return os.environ | {NAME: self._mark}

    def pids(self) -> list[int]:
        """The process ids in order."""
        pids = []
        for folder in Path("/proc").iterdir():
            try:
                if f"{NAME}={self._mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:
                continue
        return sorted(pids)

    def wait_until(self, enough: Callable[[int], bool]) -> None:
        """Wait until ``enough`` holds of their number; only the test's own time limit ends it."""
        while not enough(len(self.pids())):
            time.sleep(0.01)
