"""The output of a launched server: passed on as it comes; the last lines are kept for errors."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections import deque
from pathlib import Path
from threading import Thread

STDERR = 2
KEPT_LINES = 200
LAST_WORDS_SECONDS = 1.0
"""Seconds to wait for more output after the process has ended."""
MESSAGE_LETTERS = 400
_ERROR = re.compile(rb"^(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b|.*\berror: )")
"""Matches a traceback's last line, or argparse's error."""
_ECHO = re.compile(rb"^\S*(?:SystemExit|KeyboardInterrupt|CalledProcessError)\b")
"""Last lines of processes that do not state the cause of their end."""


class ServerOutput:
    """Passes the lines of one process on to a file or to our stderr."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path | None) -> None:
        """``process`` must have its output in a pipe."""
        self._process = process
        self._file = file
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._thread = Thread(target=self._pass_on, name="server output", daemon=True)
        self._thread.start()

    def error(self) -> str:
        """The last line that looks like an error, else the last line; empty without output."""
        self._thread.join(LAST_WORDS_SECONDS)  # its children may keep the pipe open
        lines = [line.strip() for line in self._lines if line.strip()]
        errors = [line for line in lines if _ERROR.match(line) and not _ECHO.match(line)]
        line = (errors or lines or [b""])[-1]
        return line[:MESSAGE_LETTERS].decode(errors="replace")

    def _pass_on(self) -> None:
        assert self._process.stdout is not None, "started with its output in a pipe"
        with contextlib.ExitStack() as files:
            where = STDERR if self._file is None else self._file
            out = files.enter_context(open(where, "ab", buffering=0, closefd=where != STDERR))
            for line in files.enter_context(self._process.stdout):
                self._lines.append(line)
                out.write(line)
