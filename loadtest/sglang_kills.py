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

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.listed import at_least_1
from loadtest.on_sglang import (
    PYTHON,
    START_SECONDS,
    at_work,
    engine_on,
    policy_server,
    remembered,
    reward_server,
    started,
    to_its_end,
)
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Item, Method, grow, items_of
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from runtime.text import Text
from search.engine import Engine, EngineError
from search.outcome import Outcome
from search.spec import SearchSpec

COLUMNS = (
    *("searches", "answered", "wrong", "other_digests", "undisturbed_other_digests", "kills"),
    *("moved", "sent_again", "orphans", "seconds"),
)
TASK = "game24"
SPEC = SearchSpec(policy="rebase", width=8)
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


@dataclass(slots=True)
class Grown:
    """What came of searches, in order: an outcome, or what an error said."""

    found: list[Outcome | str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        """What was said instead of an answer."""
        return [one for one in self.found if isinstance(one, str)]


async def grow_each(engine: Engine, items: Sequence[Item], at_once: int) -> Grown:
    """Search every item, ``at_once`` side by side."""
    text, room, start = Text(SPRIG.policy), asyncio.Semaphore(at_once), time.monotonic()
    done = 0

    async def one(number: int, item: Item) -> Outcome | str:
        nonlocal done
        async with room:
            try:
                outcome = await grow(engine, text, item, Method(f"search {number}", SPEC))
            except EngineError as error:
                return str(error)
            finally:
                done += 1
                if done % 25 == 0:
                    say(f"{done} of {len(items)} searches")
            return outcome

    found = await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))
    return Grown(list(found), time.monotonic() - start)


def items_for(searches: int) -> list[Item]:
    """Questions of the task's test split, each with a seed of its own; over again if need be."""
    known = items_of(TASK, "test", searches, 0)
    return [
        Item(TASK, known[n % len(known)].question, known[n % len(known)].seed + n // len(known))
        for n in range(searches)
    ]


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
        "wrong": sum(_said(mine) != _said(other) for mine, other in pairs),
        "other_digests": sum(mine.digest != other.digest for mine, other in pairs),
    }


def _said(outcome: Outcome) -> tuple[Any, ...]:
    """A search's answer and all of its steps."""
    return outcome.answer, *(node.tokens for node in outcome.tree.nodes)


async def measure(python: Path, searches: int, at_once: int) -> dict[str, Any]:
    """The row: all searches undisturbed, some of them again, then all with kills."""
    items = items_for(searches)
    policies = [policy_server(python, "arborkv", POOL_TOKENS) for _ in range(2)]
    reward = reward_server(python, POOL_TOKENS)
    async with started([*policies, reward]):
        async with engine_on(policies, [reward]) as engine:
            known = await grow_each(engine, items, at_once)
            again = await grow_each(engine, items[:REPEATED], at_once)
        say(f"undisturbed: {known.seconds:.0f} s")
        async with engine_on(policies, [reward], connect_seconds=CONNECT_SECONDS) as engine:
            found, kills = await _with_kills(engine, items, at_once, policies[0])
            left = await _left(engine, policies, reward)
    return {
        "searches": searches,
        "at_once": at_once,
        "task": TASK,
        "policy": SPEC.policy,
        "width": SPEC.width,
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
        found = await grow_each(engine, items, at_once)
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
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.sglang_kills", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--python", type=Path, default=PYTHON)
    parser.add_argument("--searches", type=at_least_1, help="of all")
    parser.add_argument("--at-once", type=at_least_1, default=8, help="side by side")
    parser.add_argument("--quick", action="store_true", help="40 searches, not 300")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
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
