"""Benchmarks on SGLang servers: what is started, what ends with the benchmark, what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest import goodput, kv, policies
from loadtest.kv_plan import cases_of
from loadtest.kv_sglang import ON_SGLANG, UNTOLD
from loadtest.on_sglang import SPARE_TOKENS, longest_path, policy_server, reward_server, started
from loadtest.searches import SPRIG
from loadtest.watched import WatchedEngine
from search.counters import Usage
from search.engine import Engine, EngineDown, Sampling
from search.spec import SearchSpec
from search.tree import Finish, Tree
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
    """A program that a server could be run with: it leaves its process's id and sleeps."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/started\nexec sleep 600\n")
    path.chmod(0o755)
    return path


def appears(path: Path) -> str:
    """What is written there before long."""
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)
    return path.read_text().strip()


def lives(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and is not waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_servers_end_with_a_benchmark_that_is_terminated(python: Path) -> None:
    """SIGTERM while a server starts: it does not outlive the benchmark. Interrupts are ignored
    there, as in whatever a shell runs in the background."""
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
    ("kv_policy", "told", "untold"),
    [
        ("lru", (), ("--radix-eviction-policy", "--radix-cache-backend")),
        ("priority", ("--radix-eviction-policy", "priority"), ("--radix-cache-backend",)),
        ("arborkv", ("--radix-cache-backend", "hedgerow"), ("--radix-eviction-policy",)),
    ],
)
def test_what_a_server_is_told(
    python: Path, kv_policy: str, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    """Each way to evict has its options and no other's; the pool is exact; draws follow seeds."""
    command = policy_server(python, kv_policy, 777, args=("--schedule-policy", "lpm")).options
    words = command.command(1)
    assert set(told) <= set(words)
    assert not set(untold) & set(words)
    assert words[words.index("--max-total-tokens") + 1] == "777"
    assert words[-2:] == ["--schedule-policy", "lpm"]
    assert command.seeds
    assert not reward_server(python, 777).options.seeds


def test_the_longest_path_that_a_pool_must_hold() -> None:
    """A prompt of 3 and steps of 4 and 5 that went on, one of 90 that did not: 12 tokens, a next
    step of 32, and what scoring and SGLang take."""
    tree = Tree((1, 2, 3))
    for parent, size in ((0, 4), (1, 5), (0, 90), (2, 1)):
        tree.add(parent, range(size), "", Finish.STEP)
    outcome: Any = SimpleNamespace(tree=tree)
    spec = SearchSpec(policy="rebase", width=4, max_step_tokens=32, max_depth=6)
    assert longest_path(outcome, spec, (2, 1)) == 12 + 32 + 2 + 6 + SPARE_TOKENS


class Held(ScriptedEngine):
    """An engine that reports more KV from look to look."""

    looks = 0

    async def usage(self) -> Usage:
        """So many looks."""
        self.looks += 1
        return Usage(kv_tokens_active=10 * self.looks, kv_tokens_cached=5)


@pytest.mark.parametrize("looks", [True, False])
async def test_a_watched_engine_is_the_same_engine(looks: bool) -> None:
    """Its calls are timed; its KV is looked at after each, or never."""
    engine = Held()
    ticks = iter(range(100))
    watched: Engine = (seen := WatchedEngine(engine, looks=looks, clock=lambda: float(next(ticks))))
    assert await watched.expand("t", [], Sampling()) == []
    assert await watched.score("t", (1,), "", []) == []
    assert seen.seconds == {"expand": 1.0, "score": 1.0}
    assert (seen.held, seen.cached) == ((20, 25) if looks else (0, 0))
    assert engine.looks == 2 * looks


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (policies.main, ["--threads", "2"], "loadtest.policies: --threads 2: the embedded"),
        (kv.main, ["--threads", "2"], "loadtest.kv: --threads 2: the embedded engine's alone"),
        (kv.main, ["--theta", "t.json"], "loadtest.kv: --theta t.json: the embedded engine's"),
        (kv.main, ["--plot", "a.png"], "loadtest.kv: --plot a.png: the embedded engine's alone"),
        (kv.main, ["--policy", "full"], "--policy full: known are lru, priority, arborkv"),
        (goodput.main, ["--clock", "cpu"], "--clock cpu: SGLang computes in processes of its own"),
    ],
)
def test_what_is_the_embedded_engines_alone_is_refused(
    main: Any, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the switch, before any server is started."""
    assert said in refused(main, ["--engine", "sglang", *words], monkeypatch)


def test_the_plans_there() -> None:
    """The same switches; every way to evict that SGLang has and every variant of goodput."""
    parsed = kv._parser().parse_args(["--engine", "sglang", "--quick", "--rho", "0.5"])
    plan = kv._plan(parsed)
    assert (plan.engine, plan.policies, plan.rhos) == ("sglang", [*ON_SGLANG], [0.5])
    assert len(cases_of(plan)) == 1
    assert UNTOLD["policy_us_p50"] is None
    parsed = goodput._parser().parse_args(["--engine", "sglang", "--quick", "--width", "4"])
    found = goodput._plan(parsed)
    assert (found.engine, found.widths) == ("sglang", [4])
    assert found.variants == ("paper_baseline", "baseline", "P", "MP", "SMP")
    parsed = policies._parser().parse_args(["--engine", "sglang", "--quick", "--limit", "3"])
    assert (policies._plan(parsed).engine, policies._plan(parsed).questions) == ("sglang", 3)


def test_servers_are_stopped_where_one_does_not_start(tmp_path: Path) -> None:
    """A program that ends at once: an error, and nothing is left."""
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
