"""The engine process's end of the pipe, through which its log lines go too.

How lines are to look, and where they go, the server's process knows: it writes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from multiprocessing.connection import Connection

from runtime.embedded.messages import FromEngine, Said, ToEngine

_FORM = logging.Formatter()


class Outlet:
    """A pipe that one thread reads and any thread may write to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Raises OSError when nobody is left to hear."""
        with self._sending:
            self._pipe.send(message)

    def recv(self) -> ToEngine:
        """Waits for a message. Raises EOFError or OSError when none will come."""
        return self._pipe.recv()

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether there is a message, after waiting so long for one."""
        return self._pipe.poll(seconds)


class LogLines(logging.Handler):
    """Hands this process's log lines to the server's."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__()
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        """A line, with its traceback if it has one; dropped when nobody is left to hear."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + _FORM.formatException(record.exc_info)
        with contextlib.suppress(OSError):
            self._outlet.send(Said(record.levelno, record.name, text))
