"""`python -m loadtest.sglang_kills`: what is wrong, what is lost, and how a server is killed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.on_sglang import policy_server
from loadtest.searches import REBASE_8, grow_each, unlike_items
from loadtest.sglang_kills import Grown, Killer, compared, held
from runtime.sglang.launched_server import LaunchedServer
from search.engine import Branch, EngineDown, Sampling, Step
from search.outcome import Outcome
from tests.search.scripted_engine import ScriptedEngine


async def grown() -> tuple[Outcome, Outcome]:
    """Two searches over different questions."""
    items = unlike_items("game24", 2)
    first, second = await grow_each(ScriptedEngine(), items, REBASE_8, 2)
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    return first, second


async def test_a_row_by_hand() -> None:
    """Of four searches one is the same, one has a digest of its own alone, one other steps, and one
    ended with an error."""
    first, second = await grown()
    known = Grown([first, first, first, first])
    found = Grown([first, replace(first, digest="other"), second, "the server is gone"])
    row = compared(found, known)
    assert row == {"answered": 3, "wrong": 1, "other_digests": 2}
    assert found.errors == ["the server is gone"]
    assert compared(Grown([first]), known) == {"answered": 1, "wrong": 0, "other_digests": 0}


def test_what_must_hold() -> None:
    """All answered, none wrong, nothing left; a digest's last digit may turn."""
    row = {"searches": 3, "answered": 3, "wrong": 0, "orphans": 0, "other_digests": 1}
    assert held(row)
    for name, value in (("answered", 2), ("wrong", 1), ("orphans", 1)):
        assert not held(row | {name: value})


def test_no_two_searches_are_the_same() -> None:
    """Also where there are more searches than questions."""
    items = unlike_items("game24", 2000)
    assert len(items) == 2000
    assert len({(item.question, item.seed) for item in items}) == 2000


class Failing(ScriptedEngine):
    """An engine that is down for the second search."""

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Nothing for that one."""
        if tree.startswith("search 1-"):
            raise EngineDown("no policy server answers")
        return await super().expand(tree, branches, sampling)


async def test_a_search_that_fails_is_noted_and_the_others_go_on() -> None:
    """What the error said, in the search's place."""
    found = await grow_each(Failing(), unlike_items("game24", 3), REBASE_8, 1)
    assert Grown(found).errors == [found[1]] == ["no policy server answers"]
    assert all(isinstance(one, Outcome) for one in found[::2])


@dataclass(eq=False, slots=True)
class Sleeper(LaunchedServer):
    """A server that is ready at once and does nothing."""

    async def ready(self, seconds: float) -> None:
        """It is."""


async def test_a_killer_leaves_its_victim_running(tmp_path: Path) -> None:
    """It kills until it is told that all is over, and each time starts the server again."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    victim = Sleeper(policy_server(path, "lru", 100).options)
    victim.start()
    first = victim.process
    assert isinstance(first, subprocess.Popen)
    killer, over = Killer(victim, alive_seconds=0.05), asyncio.Event()
    at_large = asyncio.create_task(killer.at_large(over))
    try:
        async with asyncio.timeout(60):
            while killer.kills < 2:
                await asyncio.sleep(0.01)
            over.set()
            await at_large
        assert first.poll() == -9
        assert victim.process is not None
        assert victim.ended is None
    finally:
        victim.stop()
