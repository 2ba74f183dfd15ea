"""Processes of a test, found by a mark in their environment, whoever has started them."""

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
    """What is left of them afterwards is ended."""
    processes = MarkedProcesses()
    try:
        yield processes
    finally:
        for pid in processes.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class MarkedProcesses:
    """Those whose environment has this mark, but for what has ended and is not waited for."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """Ours with the mark; what a process starts has it too."""
        return os.environ | {NAME: self._mark}

    def pids(self) -> list[int]:
        """In order of their ids."""
        pids = []
        for folder in Path("/proc").iterdir():
            try:
                if f"{NAME}={self._mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:
                continue
        return sorted(pids)

    def wait_until(self, enough: Callable[[int], bool]) -> None:
        """Until so many are there; a test's own time limit ends what never comes."""
        while not enough(len(self.pids())):
            time.sleep(0.01)
