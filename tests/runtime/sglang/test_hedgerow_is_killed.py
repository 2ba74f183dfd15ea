"""``hedgerow serve --launch`` is killed: nothing that it started is left, and it starts again."""

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

LEFT_SECONDS = 10.0
"""For all that was started to be gone."""
SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def serve(found: MarkedProcesses, **settings: str) -> subprocess.Popen[str]:
    """The command, with servers of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "serve", "--port", "0"],
        env=found.environment | LAUNCH | {"HEDGEROW_SPECULATE": "false"} | settings,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str], found: MarkedProcesses) -> float:
    """Seconds until nothing is left."""
    process.kill()
    process.communicate()
    begun = time.monotonic()
    found.wait_until(lambda count: not count)
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_while_its_servers_start(tmp_path: Path) -> None:
    """Two servers, each with a child that has left its group."""
    python = python_that(tmp_path, SLEEPER)
    with marked() as found:
        process = serve(found, HEDGEROW_LAUNCH_PYTHON=str(python))
        assert process.stderr is not None
        assert any("SGLang starts" in line for line in process.stderr)
        found.wait_until(lambda count: count == 1 + 2 * 3)
        kill(process, found)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_with_real_servers_at_random_moments() -> None:
    """By how many processes there are while they start, and then ready; after each kill it comes
    up again."""
    whole = 1 + 2 * 4  # of a server: who looks after it, front end, scheduler, detokenizer
    moments = [*random.Random(2).sample(range(2, whole), 2), whole]
    with marked() as found:
        for moment in moments:
            process = serve(found)
            assert process.stderr is not None
            if moment < whole:
                found.wait_until(lambda count, least=moment: count >= least)
            else:
                assert any("ready: serving" in line for line in process.stderr)
                assert len(found.pids()) >= whole
            assert kill(process, found) < LEFT_SECONDS
