"""A process that ends, with all its descendants, when this process ends for any reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from runtime import supervisor

FORCE_SECONDS = 10.0
"""Seconds after which a supervisor that has not ended is killed itself."""


class SupervisedProcess(subprocess.Popen[bytes]):
    """A command run by ``runtime/supervisor.py``. The process is the supervisor's: it leads the
    process group of both and ends with the command's exit status.

    For a command that cannot be run the status is 127.
    """

    def __init__(self, command: Sequence[str], **more: Any) -> None:
        """``more``: Popen's ``env``, ``cwd``, ``stdout`` and ``stderr``."""
        super().__init__(
            [sys.executable, "-I", supervisor.__file__, *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **more,
        )

    def end(self) -> None:
        """End the command and its descendants, by force if need be, and wait for the end."""
        assert self.stdin is not None, "started with a pipe"
        self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.wait(supervisor.GRACE_SECONDS + FORCE_SECONDS)
        if self.poll() in (None, -signal.SIGKILL):  # others of its group may still run
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(FORCE_SECONDS)
