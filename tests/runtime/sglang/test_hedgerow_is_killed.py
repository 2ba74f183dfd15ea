"""When ``hedgerow serve --launch`` is killed, its processes end, and it can start again."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.hostile.killed_starts import python_that
from runtime.supervisor import LINUX
from tests.processes import MarkedProcesses, marked
from tests.runtime.sglang.support import LAUNCH, ROOT

pytestmark = pytest.mark.skipif(not LINUX, reason="reads /proc")

GONE_SECONDS = 10.0
"""The time within which all started processes must be gone."""
SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def serve(processes: MarkedProcesses, **settings: str) -> subprocess.Popen[str]:
    """Start ``hedgerow serve --launch`` with these settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "serve", "--port", "0"],
        env=processes.environment | LAUNCH | {"HEDGEROW_SPECULATE": "false"} | settings,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str], processes: MarkedProcesses) -> float:
    """Kill the command; the seconds until none of its processes is left."""
    process.kill()
    process.communicate()
    start = time.monotonic()
    processes.wait_until(lambda count: not count)
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_while_its_servers_start(tmp_path: Path) -> None:
    """A kill during start-up ends both servers and a child of each in a session of its own."""
    python = python_that(tmp_path, SLEEPER)
    with marked() as processes:
        process = serve(processes, HEDGEROW_LAUNCH_PYTHON=str(python))
        assert process.stderr is not None
        assert any("SGLang starts" in line for line in process.stderr)
        processes.wait_until(lambda count: count == 1 + 2 * 3)
        kill(process, processes)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_with_real_servers_at_random_moments() -> None:
    """Kills at random process counts during start-up and once when ready; each time it starts
    again."""
    whole = 1 + 2 * 4  # for each server: supervisor, front end, scheduler, detokenizer
    moments = [*random.Random(2).sample(range(2, whole), 2), whole]
    with marked() as processes:
        for moment in moments:
            process = serve(processes)
            assert process.stderr is not None
            if moment < whole:
                processes.wait_until(lambda count, least=moment: count >= least)
            else:
                assert any("ready: serving" in line for line in process.stderr)
                assert len(processes.pids()) >= whole
            assert kill(process, processes) < GONE_SECONDS
