"""Runs a command, and ends it with all its descendants once its starter closes the pipe or ends.

    python -I supervisor.py COMMAND...

Its standard input is a pipe that only its starter holds open: when the starter ends for any reason,
the pipe closes. It is a separate program, of the standard library alone, because a starter that is
killed cannot clean up. It leads a process group, and ends with the command's exit status.

On Linux all descendants of the command are found, even those that left the group and whose parents
have ended; and if this program itself is killed, so is the command. Elsewhere only the process
group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict
from typing import NoReturn

GRACE_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL: short, since nothing that runs here has data to save."""
LOOK_SECONDS = 0.05
NOT_STARTED = 127
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervised:
    """The command's process and its descendants."""

    def __init__(self, command: list[str]) -> None:
        self.status: int | None = None
        """The command's ``waitpid`` status; None while it runs."""
        if LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        ours = os.getpid()
        self._child = os.fork()
        if not self._child:
            _become(command, ours)

    def reap(self) -> None:
        """Reap ended processes, and keep the command's status if it is among them."""
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG))[0]:
                if process[0] == self._child:
                    self.status = process[1]

    def end(self, grace: float) -> None:
        """End all descendants: SIGTERM if ``grace`` > 0, SIGKILL after ``grace`` seconds."""
        until = time.monotonic() + grace
        if grace:
            self._send(signal.SIGTERM)
        while self._is_running():
            if time.monotonic() >= until:
                self._send(signal.SIGKILL)
            time.sleep(LOOK_SECONDS)

    def _is_running(self) -> bool:
        self.reap()
        return bool(descendants()) if LINUX else self.status is None

    def _send(self, sign: signal.Signals) -> None:
        if not LINUX:
            os.killpg(0, sign)
        for pid in descendants() if LINUX else ():
            with contextlib.suppress(OSError):
                os.kill(pid, sign)


def _become(command: list[str], parent: int) -> NoReturn:
    """Replace this process by the command, with empty input; Linux kills it if the parent dies."""
    try:
        if LINUX:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        if os.getppid() == parent:
            for sign in ENDING:
                signal.signal(sign, signal.SIG_DFL)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(NOT_STARTED)


def prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl``. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def descendants() -> list[int]:
    """The process ids of all descendants of this process."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            parent = stat.read().rpartition(b")")[2].split()[1]
            children[int(parent)].append(int(name))
    pids = [os.getpid()]
    for pid in pids:
        pids += children[pid]
    return pids[1:]


def main(command: list[str]) -> NoReturn:
    """Run the command until it ends or is to end; then end everything and exit."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for sign in (signal.SIGCHLD, *ENDING):
        signal.signal(sign, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    supervised, running = Supervised(command), True
    while running and supervised.status is None:
        ready, _, _ = select.select([sys.stdin, read_end], [], [])
        signs = os.read(read_end, 4096) if read_end in ready else b""
        running = sys.stdin not in ready and not set(signs).intersection(ENDING)
        supervised.reap()
    supervised.end(0.0 if supervised.status is not None else GRACE_SECONDS)
    _end_as(os.waitstatus_to_exitcode(supervised.status or 0))


def _end_as(code: int) -> NoReturn:
    """Exit with ``code``, or by the signal -code if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
