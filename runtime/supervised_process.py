"""A process that does not outlive us, whatever ends us; nor does what it has started."""

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
"""After which the one that ends all others is itself ended."""


class SupervisedProcess(subprocess.Popen[bytes]):
    """A command below ``runtime/supervisor.py``, whose process this is: it ends as the command does
    and leads the process group of both.

    A command that cannot be run ends with 127.
    """

    def __init__(self, command: Sequence[str], **more: Any) -> None:
        """``more``: ``env``, ``cwd``, ``stdout`` and ``stderr``, as of Popen."""
        super().__init__(
            [sys.executable, "-I", supervisor.__file__, *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **more,
        )

    def end(self) -> None:
        """End it and what it has started, by force if need be. Waits."""
        assert self.stdin is not None, "started with a pipe"
        self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.wait(supervisor.GRACE_SECONDS + FORCE_SECONDS)
        if self.poll() in (None, -signal.SIGKILL):  # it may have left the others of its group
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(FORCE_SECONDS)
