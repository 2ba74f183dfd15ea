"""Started processes do not outlive their starter, however that one ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import supervised_process, supervisor
from runtime.supervised_process import SupervisedProcess
from tests.processes import MarkedProcesses, marked

pytestmark = pytest.mark.skipif(not supervisor.LINUX, reason="reads /proc")

FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
sleep = [sys.executable, "-S", "-c", code]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(sleep)
    os._exit(0)
time.sleep(600)
"""
"""A server with three children: a plain one, one in its own session, and an orphan; all ignore
SIGTERM."""
GENTLE = FAMILY.replace("signal.SIG_IGN", "signal.SIG_DFL")
"""The same family, but all end on SIGTERM."""
MEMBERS = 5
"""These four and their supervisor."""
STARTER = """
import sys, time
from runtime.supervised_process import SupervisedProcess
process = SupervisedProcess(sys.argv[1:], cwd="/")
time.sleep(600)
"""


@pytest.fixture
def family() -> Iterator[MarkedProcesses]:
    """All processes that the test starts."""
    with marked() as processes:
        yield processes


def starter(family: MarkedProcesses, *command: str) -> subprocess.Popen[bytes]:
    """A process that starts ``command`` under a supervisor and then sleeps."""
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, *command], env=family.environment, stdin=subprocess.DEVNULL
    )


@pytest.mark.slow
@pytest.mark.promise(
    "Processes that `--launch` starts on Linux end when their starter is killed, even if they "
    "ignore SIGTERM."
)
@pytest.mark.timeout(60)
def test_nothing_is_left_of_a_family_whose_starter_is_killed(family: MarkedProcesses) -> None:
    """All processes end, though they ignore SIGTERM, and some left the group or are orphans."""
    with starter(family, sys.executable, "-S", "-c", FAMILY) as process:
        family.wait_until(lambda count: count == 1 + MEMBERS)
        process.kill()
    family.wait_until(lambda count: not count)


@pytest.mark.promise(
    "Processes that `--launch` starts also end when their starter is killed while it still starts"
    " them."
)
@pytest.mark.timeout(120)
def test_nor_at_any_moment_of_its_start(family: MarkedProcesses) -> None:
    """Kills of the starter at random moments of the start leave nothing."""
    for moment in random.Random(1).choices(range(1 + MEMBERS), k=8):
        with starter(family, sys.executable, "-S", "-c", GENTLE) as process:
            while len(family.pids()) < moment:
                pass
            process.kill()
        family.wait_until(lambda count: not count)


@pytest.mark.promise(
    "A launched command ends when its supervisor is killed, and `end` then ends the rest of its "
    "process group."
)
@pytest.mark.timeout(60)
def test_who_looks_after_it_is_killed(family: MarkedProcesses) -> None:
    """If the supervisor is killed its command is too, and ``end`` ends the rest of the group."""
    process = SupervisedProcess(
        [sys.executable, "-S", "-c", FAMILY], env=family.environment, stdout=subprocess.DEVNULL
    )
    family.wait_until(lambda count: count == MEMBERS)
    command = min(set(family.pids()) - {process.pid})
    process.kill()
    family.wait_until(lambda count: count == MEMBERS - 2)
    assert command not in family.pids()
    process.end()
    family.wait_until(lambda count: count == 1)
    (survivor,) = family.pids()
    assert os.getsid(survivor) == survivor, "it is not in the group"


@pytest.mark.promise(
    "A supervisor that is stopped, and its process group, are killed when the launched command is"
    " to end."
)
@pytest.mark.timeout(60)
def test_who_looks_after_it_stands_still(
    family: MarkedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen supervisor and its group are killed by ``end``."""
    monkeypatch.setattr(supervised_process, "FORCE_SECONDS", 1.0)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)
    process = SupervisedProcess([sys.executable, "-S", "-c", GENTLE], env=family.environment)
    family.wait_until(lambda count: count == MEMBERS)
    os.killpg(process.pid, signal.SIGSTOP)
    process.end()
    family.wait_until(lambda count: count == 1)
    (survivor,) = family.pids()
    assert os.getsid(survivor) == survivor


@pytest.mark.promise(
    "A supervisor ends with the status of its command and leaves no process, even if the command "
    "crashes."
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        (GENTLE.replace("time.sleep(600)\n", "raise SystemExit(4)\n"), 4),
    ],
)
def test_it_ends_as_the_command_does(code: str, status: int, family: MarkedProcesses) -> None:
    """The supervisor ends with the command's status, and no process is left."""
    process = SupervisedProcess([sys.executable, "-S", "-c", code], env=family.environment)
    assert process.wait() == status
    family.wait_until(lambda count: not count)
    process.end()


@pytest.mark.timeout(60)
def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    """A command that cannot be run gives an error line and the status NOT_STARTED."""
    nothing = str(tmp_path / "nothing")
    process = SupervisedProcess([nothing], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == f"error: {nothing}: No such file or directory\n".encode()
    assert process.wait() == supervisor.NOT_STARTED
    process.end()


@pytest.mark.promise("Processes that `--launch` starts end when their starter just exits.")
@pytest.mark.timeout(60)
def test_who_forgets_it_ends_it(family: MarkedProcesses) -> None:
    """If the starter just exits, the processes end too."""
    code = STARTER.replace("time.sleep(600)", "")
    subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-S", "-c", GENTLE],
        env=family.environment,
        check=True,
    )
    family.wait_until(lambda count: not count)
