"""Do searches outlive the SGLang server they are on, and is any of them wrong for it?

Searches run on two servers of the policy and one of the reward model. One of the policy's is killed
20 s after it became ready, with all it has started, and starts again, until the last search has its
answer. Then every search is compared with the same one undisturbed:

- ``answered``: it ended with an answer, not with an error (``errors`` names them);
- ``wrong``: its answer or the steps of its tree are others than undisturbed;
- ``other_digests``: its tree's digest is, rewards of four digits included. SGLang's arithmetic
  follows the batch, so the last of these digits may turn: ``undisturbed_other_digests`` says in how
  many of ``undisturbed_repeated`` searches it does without any kill;
- ``moved`` searches went on at another server, ``sent_again`` requests were sent to one;
- ``orphans``: requests that the servers still ran or held back once all was over.

    python -m loadtest.sglang_kills [--searches 300] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.on_sglang import (
    START_SECONDS,
    at_work,
    engine_on,
    policy_server,
    remembered,
    reward_server,
    started,
    to_its_end,
)
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import REBASE_8, Item, grow_each, steps_of, unlike_items
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from search.engine import Engine
from search.outcome import Outcome

COLUMNS = (
    *("searches", "answered", "wrong", "other_digests", "undisturbed_other_digests", "kills"),
    *("moved", "sent_again", "orphans", "seconds"),
)
TASK = "game24"
POOL_TOKENS = 20_000
ALIVE_SECONDS = 20.0
"""A server is killed so long after it became ready."""
REPEATED = 50
"""Searches that are run undisturbed a second time."""
CONNECT_SECONDS = 10.0
"""The server's default: a killed server refuses at once, one that starts is not waited for."""


@dataclass(slots=True)
class Killer:
    """Kills a server again and again; ``kills`` so far."""

    victim: LaunchedServer
    alive_seconds: float = ALIVE_SECONDS
    kills: int = 0

    async def at_large(self, over: asyncio.Event) -> None:
        """Go on until all is over; the server is ready then."""
        while not await _set_within(over, self.alive_seconds):
            kill(self.victim)
            self.kills += 1
            say(f"killed {self.victim.url}: {self.kills}")
            await asyncio.to_thread(self.victim.stop)
            self.victim.start()
            await self.victim.ready(START_SECONDS)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def kill(server: LaunchedServer) -> None:
    """End a server and what it has started without a word."""
    assert server.process is not None, "it was started"
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


@dataclass(frozen=True, slots=True)
class Grown:
    """What came of searches, in order: an outcome, or what an error said."""

    found: list[Outcome | str]
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        """What was said instead of an answer."""
        return [one for one in self.found if isinstance(one, str)]


async def grown(engine: Engine, items: Sequence[Item], at_once: int) -> Grown:
    """Search every item, ``at_once`` side by side."""
    start = time.monotonic()
    found = await grow_each(engine, items, REBASE_8, at_once)
    return Grown(found, time.monotonic() - start)


def compared(disturbed: Grown, undisturbed: Grown) -> dict[str, Any]:
    """How many searches had an answer, and how many another one or another tree than undisturbed.

    Of searches that ended with an error only ``answered`` speaks.
    """
    pairs = [
        (mine, other)
        for mine, other in zip(disturbed.found, undisturbed.found, strict=False)
        if isinstance(mine, Outcome) and isinstance(other, Outcome)
    ]
    return {
        "answered": len(disturbed.found) - len(disturbed.errors),
        "wrong": sum(
            (mine.answer, steps_of(mine)) != (other.answer, steps_of(other))
            for mine, other in pairs
        ),
        "other_digests": sum(mine.digest != other.digest for mine, other in pairs),
    }


async def measure(python: Path, searches: int, at_once: int) -> dict[str, Any]:
    """The row: all searches undisturbed, some of them again, then all with kills."""
    items = unlike_items(TASK, searches)
    policies = [policy_server(python, "arborkv", POOL_TOKENS) for _ in range(2)]
    reward = reward_server(python, POOL_TOKENS)
    async with started([*policies, reward]):
        async with engine_on(policies, [reward]) as engine:
            known = await grown(engine, items, at_once)
            again = await grown(engine, items[:REPEATED], at_once)
        say(f"undisturbed: {known.seconds:.0f} s")
        async with engine_on(policies, [reward], connect_seconds=CONNECT_SECONDS) as engine:
            found, kills = await _with_kills(engine, items, at_once, policies[0])
            left = await _left(engine, policies, reward)
    return {
        "searches": searches,
        "at_once": at_once,
        "task": TASK,
        "policy": REBASE_8.policy,
        "width": REBASE_8.width,
        **compared(found, known),
        "undisturbed_repeated": len(again.found),
        "undisturbed_other_digests": compared(again, known)["other_digests"],
        "undisturbed_errors": known.errors,
        "undisturbed_seconds": round(known.seconds, 1),
        "errors": found.errors,
        "kills": kills,
        "seconds": round(found.seconds, 1),
        **left,
    }


async def _with_kills(
    engine: SglangEngine, items: Sequence[Item], at_once: int, victim: LaunchedServer
) -> tuple[Grown, int]:
    """The searches while a killer is at large, and how often it killed."""
    killer, over = Killer(victim), asyncio.Event()
    at_large = asyncio.create_task(killer.at_large(over))
    try:
        found = await grown(engine, items, at_once)
    except BaseException:
        at_large.cancel()
        raise
    over.set()
    await at_large
    return found, killer.kills


async def _left(
    engine: SglangEngine, policies: Sequence[LaunchedServer], reward: LaunchedServer
) -> dict[str, Any]:
    """What is left of the searches on the servers, all of which are ready."""
    return {
        "moved": engine.moves,
        "sent_again": engine.sent_again,
        "orphans": sum([await at_work(server) for server in (*policies, reward)]),
        "searches_remembered": sum([await remembered(server) for server in policies]),
    }


def main() -> None:
    """Print a table, or one JSON document; end with 1 if a search was lost, wrong or left."""
    parser = BenchmarkParser(
        "sglang_kills", __doc__, "searches", "python", quick="40 searches, not 300"
    )
    parser.add_argument("--at-once", type=at_least(1), default=8, help="side by side")
    wanted = parser.parse_args()
    searches = wanted.searches or (40 if wanted.quick else 300)
    row = to_its_end(measure(wanted.python, searches, wanted.at_once))
    publish({"rows": [row]}, wanted.json, "Servers killed under searches", COLUMNS)
    sys.exit(not held(row))


def held(row: dict[str, Any]) -> bool:
    """Whether all searches were answered, none wrong, and nothing is left."""
    return row["answered"] == row["searches"] and not row["wrong"] and not row["orphans"]


if __name__ == "__main__":
    main()
