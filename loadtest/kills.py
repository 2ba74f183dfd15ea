"""Do searches survive faults of their servers and wires, and does any go wrong because of them?

`python -m loadtest.kills [--servers sglang|vllm] [--searches 300] [--kills 4] [--quick] [--json]`

Real servers of the bundled models on this machine's CPU. Every search is grown undisturbed, some of
them a second time. Then all are grown while a server of the policy is killed, with all it has
started, and started again: each time another share of the searches is done. With ``--keep`` a run
that was cut off goes on from there.

- ``sglang`` (``make sglang-env``): one of two servers is killed;
- ``vllm`` (``make vllm-env``): the only one, over proxies that cut, delay and say "too many
  requests".

A row says

- ``answered``: it ended with an answer, not with an error (``errors`` names them);
- ``wrong``: its answer or its steps are not those of the undisturbed search;
- ``other_digests``: its tree's digest differs, rewards of four digits included; and in how many of
  ``repeated`` undisturbed searches it differs without a fault (``undisturbed_other_digests``):
  arithmetic that depends on the batch may change the last of these digits;
- ``kills``, also before a run was cut off; of this run alone ``sent_again`` requests, searches that
  ``moved`` to another server, ``refused``: answers that became 429 with ``Retry-After``;
  ``faults``: the others, by name;
- ``left``: requests that the servers still had once all was over.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cli.kept_lines import KeptLines
from loadtest.hostile.killed_servers import RealVictim
from loadtest.hostile.toxics import SILENCE, TOO_MANY, TOXICS, Proxy, listening
from loadtest.on_sglang import (
    at_work,
    engine_on,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.on_vllm import POLICY_OPTIONS, VllmServer, engine_at, serving
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import REBASE_8, SPRIG, Item, Method, grow, side_by_side, unlike_items
from runtime.openai.openai_engine import OpenaiEngine
from search.engine import Engine, EngineError

COLUMNS = (
    *("servers", "searches", "answered", "wrong", "other_digests", "undisturbed_other_digests"),
    *("kills", "moved", "refused", "sent_again", "left", "seconds"),
)
FULL = {"sglang": (300, 4), "vllm": (100, 10)}
"""Searches, and how often a server is killed under them."""
QUICK = {"sglang": (40, 2), "vllm": (6, 1)}
AT_ONCE = 8
REPEATED = 6
"""One search in REPEATED is run undisturbed a second time."""
POOL_TOKENS = 20_000
CONNECT_SECONDS = 10.0
"""To an SGLang server: a killed one refuses at once, and a starting one is not waited for."""
SHARE = 0.03
"""The share of the answers on a wire that have a fault."""
SILENT_SECONDS = 20.0
"""Seconds that a wire stays silent before it closes."""
PATIENCE_SECONDS = 60.0
"""Seconds to wait for a vLLM server that works and is silent."""
PAUSE_SECONDS = 0.5, 3.0
"""Least and most seconds before a kill that is due."""
CALM, AGAIN, FAULTY, KILLS = "undisturbed", "repeated", "faulty", "kills"
Restart = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """How a search ended. ``steps``: a digest of its answer and of all of its steps' tokens."""

    error: str = ""
    steps: str = ""
    digest: str = ""
    seconds: float = 0.0


class Searches:
    """Grows searches by number; those in the file are not grown again."""

    def __init__(self, path: Path | None, servers: str, items: Sequence[Item]) -> None:
        """``path``: the file of ended searches; None: they are not kept."""
        spec = REBASE_8.model_dump_json(exclude_none=True)
        self._kept = KeptLines(path, f"{servers} {spec}", TypeAdapter(SearchEnd))
        self._killed = KeptLines(path, f"{servers} {spec} kills", TypeAdapter(int))
        self._items = items
        self.done = asyncio.Condition()

    def ends(self, phase: str) -> dict[int, SearchEnd]:
        """The searches of a phase that have ended, by number."""
        ends = {n: self._kept.get(self._name(phase, n)) for n in range(len(self._items))}
        return {number: end for number, end in ends.items() if end is not None}

    async def run(self, phase: str, engine: Engine, numbers: Sequence[int]) -> None:
        """Grow those of these numbers that have not ended yet, ``AT_ONCE`` side by side."""
        ends = self.ends(phase)

        async def grow_number(number: int) -> None:
            end = await self._grow(engine, number)
            self._kept.put(self._name(phase, number), end)
            say(f"{phase}: {len(self.ends(phase))} of {len(numbers)}, {end.seconds:.0f} s")
            async with self.done:
                self.done.notify_all()

        await side_by_side(
            grow_number, (number for number in numbers if number not in ends), AT_ONCE
        )

    async def undisturbed(self, engine: Engine) -> None:
        """Grow all searches, and some a second time."""
        count, start = len(self._items), time.monotonic()
        await self.run(CALM, engine, range(count))
        await self.run(AGAIN, engine, range(max(1, count // REPEATED)))
        say(f"undisturbed: {time.monotonic() - start:.0f} s")

    async def under_kills(self, engine: Engine, kills: int, restart: Restart) -> None:
        """Grow all searches while ``restart`` kills and restarts a server, ``kills`` times."""
        killing = asyncio.create_task(self.kill(kills, restart))
        try:
            await self.run(FAULTY, engine, range(len(self._items)))
        except BaseException:
            killing.cancel()
            raise
        await killing

    async def kill(self, kills: int, restart: Restart) -> None:
        """Restart a server each time a further share of the searches has ended, after a pause."""
        dice = random.Random(0)
        for number in range(self.kills, kills):
            due = number * len(self._items) // kills
            async with self.done:
                await self.done.wait_for(lambda due=due: len(self.ends(FAULTY)) >= due)
            await asyncio.sleep(dice.uniform(*PAUSE_SECONDS))
            self._killed.put(KILLS, number + 1)
            say(f"kill {number + 1} of {kills}")
            await restart()

    def row(self) -> dict[str, Any]:
        """Counts of how all searches ended."""
        again = compared(self.ends(AGAIN), self.ends(CALM))
        return {
            "searches": len(self._items),
            "width": REBASE_8.width,
            **compared(self.ends(FAULTY), self.ends(CALM)),
            "repeated": len(self.ends(AGAIN)),
            "undisturbed_other_digests": again["other_digests"],
            "kills": self.kills,
        }

    @property
    def kills(self) -> int:
        """How often a server was killed during the searches."""
        return self._killed.get(KILLS) or 0

    async def _grow(self, engine: Engine, number: int) -> SearchEnd:
        start, item = time.monotonic(), self._items[number]
        try:
            outcome = await grow(engine, item, Method(f"search {number}", REBASE_8))
        except EngineError as error:
            return SearchEnd(error=str(error), seconds=time.monotonic() - start)
        reply = outcome.answer, [node.tokens for node in outcome.tree.nodes]
        steps = hashlib.sha256(repr(reply).encode()).hexdigest()
        return SearchEnd("", steps, outcome.digest, time.monotonic() - start)

    def _name(self, phase: str, number: int) -> str:
        return f"{phase} {number} {self._items[number].seed}"


async def on_sglang(searches: Searches, kills: int, python: Path) -> dict[str, Any]:
    """Run the searches on two servers of the policy, of which the first is killed."""
    policies = [policy_server(python, "arborkv", POOL_TOKENS) for _ in range(2)]
    reward, victim = reward_server(python, POOL_TOKENS), RealVictim(policies[0])

    async def restart() -> None:
        await victim.kill()
        await victim.start()

    async with started([*policies, reward]):
        async with engine_on(policies, [reward]) as engine:
            await searches.undisturbed(engine)
        async with engine_on(policies, [reward], connect_seconds=CONNECT_SECONDS) as engine:
            await searches.under_kills(engine, kills, restart)
            orphans = [await at_work(server) for server in (*policies, reward)]
    return {
        "moved": engine.moves,
        "sent_again": engine.sent_again,
        "left": sum(orphans),
    }


def _patient(policy: str, reward: str) -> AbstractAsyncContextManager[OpenaiEngine]:
    """An engine that waits for a server that starts again."""
    waits = dict.fromkeys(("connect_seconds", "probe_seconds", "stall_seconds"), PATIENCE_SECONDS)
    return engine_at(policy, reward, **waits, recovery_seconds=1800)


async def on_vllm(searches: Searches, kills: int) -> dict[str, Any]:
    """Run the searches on one server of each kind over faulty wires; the policy's is killed."""
    policy = VllmServer(Path(SPRIG.policy), POLICY_OPTIONS)
    reward = VllmServer(Path(str(SPRIG.prm)))

    async def restart() -> None:
        policy.kill()
        policy.start()
        await asyncio.to_thread(policy.ready)

    names = (*TOXICS, SILENCE, TOO_MANY)
    wires = [Proxy(server.port, names=names, silence=SILENT_SECONDS) for server in (policy, reward)]
    async with serving([policy, reward]), AsyncExitStack() as stack:
        async with _patient(policy.url, reward.url) as engine:
            await searches.undisturbed(engine)
        ports = [await stack.enter_async_context(listening(wire.connection)) for wire in wires]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engine = await stack.enter_async_context(_patient(*urls))
        for wire in wires:
            wire.share = SHARE
        await searches.under_kills(engine, kills, restart)
        usage = await engine.usage()
    faults = sum((wire.done for wire in wires), start=Counter())
    return {
        "refused": faults.pop(TOO_MANY, 0),
        "faults": dict(faults),
        "sent_again": usage.totals.sent_again,
        "left": usage.running + usage.waiting,
    }


def compared(disturbed: dict[int, SearchEnd], calm: dict[int, SearchEnd]) -> dict[str, Any]:
    """How many were answered, and how many had another answer or another tree than in ``calm``."""
    pairs = [
        (mine, calm[n]) for n, mine in disturbed.items() if not mine.error and not calm[n].error
    ]
    return {
        "answered": sum(not end.error for end in disturbed.values()),
        "errors": sorted({end.error for end in disturbed.values() if end.error}),
        "wrong": sum(mine.steps != other.steps for mine, other in pairs),
        "other_digests": sum(mine.digest != other.digest for mine, other in pairs),
    }


def held(row: dict[str, Any]) -> bool:
    """Whether all searches were answered, none wrong, and nothing is left."""
    return row["answered"] == row["searches"] and not row["wrong"] and not row["left"]


async def measure(
    servers: str, searches: int, kills: int, kept_in: Path | None, python: Path
) -> dict[str, Any]:
    """Run the searches that are not kept yet; the row of all."""
    start, runner = time.monotonic(), Searches(kept_in, servers, unlike_items("game24", searches))
    if servers == "vllm":
        disturbed = await on_vllm(runner, kills)
    else:
        disturbed = await on_sglang(runner, kills, python)
    row = dict.fromkeys(COLUMNS) | {"servers": servers} | runner.row() | disturbed
    return row | {"seconds": round(time.monotonic() - start)}


def main() -> None:
    """Print a table, or one JSON document; end with 1 if a search was lost, wrong or left."""
    parser = BenchmarkParser(
        "kills", __doc__, "searches", "keep", "python", quick="fewer searches, and fewer kills"
    )
    parser.add_argument("--servers", choices=FULL, default="sglang")
    parser.add_argument("--kills", type=at_least(1))
    options = parser.parse_args()
    searches, kills = (QUICK if options.quick else FULL)[options.servers]
    searches, kills = options.searches or searches, options.kills or kills
    row = to_its_end(measure(options.servers, searches, kills, options.kept_in, options.python))
    publish({"rows": [row]}, options.json, "Servers killed under searches", COLUMNS)
    sys.exit(not held(row))


if __name__ == "__main__":
    main()
