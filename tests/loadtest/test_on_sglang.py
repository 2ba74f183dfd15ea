"""Benchmarks on SGLang servers: what is started, what ends with the benchmark, what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest import policies
from loadtest.on_sglang import policy_server, reward_server, started
from loadtest.searches import SPRIG
from loadtest.throughput import Looking
from search.counters import Usage
from search.engine import EngineDown, Sampling
from tests.loadtest.command import refused
from tests.search.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parent.parent.parent
STARTS_AND_WAITS = """
import asyncio, sys
from pathlib import Path
from loadtest.on_sglang import policy_server, started, to_its_end

async def work(python):
    server = policy_server(python, "lru", 100)
    async with started([server]):
        pass

to_its_end(work(Path(sys.argv[1])))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program to run a server with: it writes its process id to ``started`` and sleeps."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/started\nexec sleep 600\n")
    path.chmod(0o755)
    return path


def appears(path: Path) -> str:
    """Wait up to 120 s until the file has text, and return it."""
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)
    return path.read_text().strip()


def lives(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_servers_end_with_a_benchmark_that_is_terminated(python: Path) -> None:
    """A server that is starting does not outlive a benchmark that gets SIGTERM. The benchmark
    ignores SIGINT, like a shell's background job."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    benchmark = subprocess.Popen(
        [sys.executable, "-c", f"{ignoring}\n{STARTS_AND_WAITS}", str(python)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    server = int(appears(python.parent / "started"))
    assert lives(server)
    benchmark.send_signal(signal.SIGTERM)
    assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not lives(server)


@pytest.mark.parametrize(
    ("kv_policy", "flags", "absent_flags"),
    [
        ("lru", (), ("--radix-cache-backend",)),
        ("arborkv", ("--radix-cache-backend", "hedgerow"), ()),
    ],
)
def test_what_a_server_is_told(
    python: Path, kv_policy: str, flags: tuple[str, ...], absent_flags: tuple[str, ...]
) -> None:
    """Each eviction policy has only its own options; the pool is exact; draws follow seeds."""
    command = policy_server(python, kv_policy, 777, args=("--schedule-policy", "lpm")).options
    words = command.command(1)
    assert set(flags) <= set(words)
    assert not set(absent_flags) & set(words)
    assert words[words.index("--max-total-tokens") + 1] == "777"
    assert words[-2:] == ["--schedule-policy", "lpm"]
    assert command.seeds
    assert not reward_server(python, 777).options.seeds


class Held(ScriptedEngine):
    """An engine that counts calls of ``usage``."""

    looks = 0

    async def usage(self) -> Usage:
        """Count the call."""
        self.looks += 1
        return Usage(kv_tokens_active=0, kv_tokens_cached=0)


async def test_a_peak_is_looked_for_after_every_call() -> None:
    """``usage`` is called after every call, whose return value is passed on."""
    engine = Held()
    looking = Looking(engine)
    assert await looking.expand("t", [], Sampling()) == []
    assert await looking.score("t", (1,), "", []) == []
    assert engine.looks == 2


def test_what_is_the_embedded_engines_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line that names the option, before any server is started."""
    words = ["--engine", "sglang", "--threads", "2"]
    message = "loadtest.policies: --threads 2: the embedded"
    assert message in refused(policies.main, words, monkeypatch)


def test_the_plan_there() -> None:
    """The options of the embedded engine's plan apply on SGLang too."""
    parser = policies._parser()
    words = ["--engine", "sglang", "--quick", "--limit", "3"]
    plan = policies._plan(parser, parser.parse_args(words))
    assert (plan.engine, plan.questions) == ("sglang", 3)


def test_servers_are_stopped_where_one_does_not_start(tmp_path: Path) -> None:
    """A program that exits at once raises EngineDown, and no process is left."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    server = policy_server(path, "lru", 100, model=SPRIG.policy)

    async def start() -> None:
        async with started([server]):
            raise AssertionError("it cannot be ready")

    with pytest.raises(EngineDown, match="ended with 3"):
        asyncio.run(start())
    assert server.process is None
