"""`python -m loadtest.kills`: rows, stored results, kills, a proxy that answers 429."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loadtest import kills
from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.killed_servers import RealVictim
from loadtest.hostile.sglang_stub import MortalStub
from loadtest.hostile.toxics import TOO_MANY, Proxy, listening
from loadtest.kills import CALM, FAULTY, KILLS, SearchEnd, Searches, compared, held
from loadtest.on_sglang import policy_server
from loadtest.searches import unlike_items
from models.bundled import SPRIG_FOLDER
from runtime.sglang.launched_server import LaunchedServer
from runtime.text import Text
from search.engine import Branch, EngineDown, Sampling, Step
from tests.search.scripted_engine import ScriptedEngine


def test_a_row_by_hand() -> None:
    """Of four one is the same, one has another digest, one has other steps, one an error."""
    calm = {n: SearchEnd("", "a", "1") for n in range(4)}
    faulty = calm | {1: SearchEnd("", "a", "2"), 2: SearchEnd("", "b", "3"), 3: SearchEnd("gone")}
    row = compared(faulty, calm)
    assert row == {"answered": 3, "errors": ["gone"], "wrong": 1, "other_digests": 2}
    passing = {"searches": 4, "answered": 4, "wrong": 0, "left": 0}
    assert held(passing)
    for name, value in (("answered", 3), ("wrong", 1), ("left", 1)):
        assert not held(passing | {name: value})


def test_what_has_ended_is_kept(tmp_path: Path) -> None:
    """Results are stored by phase and number, kills beside them; another run resumes there."""
    first = Searches(tmp_path / "kept.jsonl", "vllm", unlike_items("game24", 3))
    first._kept.put(first._name(CALM, 1), SearchEnd("", "a", "1", 2.0))
    first._killed.put(KILLS, 2)
    again = Searches(tmp_path / "kept.jsonl", "vllm", unlike_items("game24", 5))
    assert again.ends(CALM) == {1: SearchEnd("", "a", "1", 2.0)}
    assert again.ends(FAULTY) == {}
    assert again.kills == 2


def test_no_two_searches_are_the_same() -> None:
    """Items differ even where there are more searches than questions."""
    items = unlike_items("game24", 2000)
    assert len(items) == 2000
    assert len({(item.question, item.seed) for item in items}) == 2000


class Failing(ScriptedEngine):
    """An engine that is down for the second search."""

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Raise EngineDown for the second search."""
        if tree.startswith("search 1-"):
            raise EngineDown("no policy server answers")
        return await super().expand(tree, branches, sampling)


async def test_kills_under_searches_of_which_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed search's error is in the row; the other searches and all kills still happen."""
    monkeypatch.setattr(kills, "PAUSE_SECONDS", (0.0, 0.0))
    searches, restarts = Searches(None, "none", unlike_items("game24", 6)), []

    async def restart() -> None:
        restarts.append(len(searches.ends(FAULTY)))

    await searches.undisturbed(ScriptedEngine())
    await searches.under_kills(Failing(), 3, restart)
    row = searches.row()
    assert (row["searches"], row["answered"], row["wrong"], row["repeated"]) == (6, 5, 0, 1)
    assert (row["other_digests"], row["undisturbed_other_digests"]) == (0, 0)
    assert (row["errors"], row["kills"]) == (["no policy server answers"], 3)
    assert [count >= least for count, least in zip(restarts, (0, 2, 4), strict=True)] == [True] * 3


@dataclass(eq=False, slots=True)
class Sleeper(LaunchedServer):
    """A server that is ready at once and does nothing."""

    async def ready(self, seconds: float) -> None:
        """Return at once."""


@pytest.mark.slow
async def test_a_killed_server_runs_again(tmp_path: Path) -> None:
    """The killed process has ended by SIGKILL, and the server runs again afterwards."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    server = Sleeper(policy_server(path, "lru", 100).options)
    server.start()
    first, victim = server.process, RealVictim(server)
    assert isinstance(first, subprocess.Popen)
    try:
        async with asyncio.timeout(60):
            await victim.kill()
            await victim.start()
        assert first.poll() == -9
        assert server.process is not None
        assert server.exit_status is None
    finally:
        server.stop()


async def test_an_answer_becomes_a_refusal() -> None:
    """The proxy answers 429 with ``Retry-After`` and closes; the next request is answered."""
    stub = MortalStub(CompletionsStub.of(Text(SPRIG_FOLDER / "policy")))
    await stub.start()
    wire = Proxy(stub.port, share=1.0, names=[TOO_MANY], dice=random.Random(0))
    try:
        async with listening(wire.connection) as port, httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/v1/models"
            refused = await http.get(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            wire.share = 0.0
            assert (await http.get(url)).is_success
        assert wire.done == {TOO_MANY: 1}
    finally:
        await stub.kill()
