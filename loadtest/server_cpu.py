"""Processor time of a launched server and of all that it has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from runtime.sglang.launched_server import LaunchedServer

SESSION, USER, SYSTEM = 3, 11, 12
"""Fields of ``/proc/PID/stat`` behind the command's name."""


def cpu_seconds(server: LaunchedServer) -> float:
    """Since its start: a launched server leads a session of its own. 0 where there is no /proc."""
    assert server.process is not None, "it runs"
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[SESSION]) == server.process.pid:
                ticks += int(fields[USER]) + int(fields[SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK")
