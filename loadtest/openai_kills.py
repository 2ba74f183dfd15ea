"""Do searches outlive the vLLM server they are on and the wires to it, and is any wrong for it?

`python -m loadtest.openai_kills [--searches 100] [--kills 10] [--quick] [--keep FILE] [--json]`

Real vLLM on the CPU (``make vllm-env``) serves the bundled policy and reward model. Every search is
grown undisturbed, some of them a second time. Then all are grown over proxies that cut, delay and
say "too many requests", while the policy's server is killed, with all it has started, and started
again: each time another share of the searches is done. With ``--keep`` a run that was cut off goes
on from there.

- ``answered``: it ended with an answer, not with an error (``errors`` names them);
- ``wrong``: its answer or its steps are others than undisturbed;
- ``other_digests``: its tree's digest is, rewards of four digits included, and in how many of
  ``repeated`` undisturbed searches it is without any fault (``undisturbed_other_digests``);
- ``kills``, also before a run was cut off; of this run alone ``sent_again`` requests,
  ``refused``: answers that became 429 with ``Retry-After``; ``faults``: the others, by name;
- ``left``: requests that the policy's server still had once all was over.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cli.kept_lines import KeptLines
from loadtest.hostile.toxics import SILENCE, TOO_MANY, TOXICS, Proxy, listening
from loadtest.on_sglang import to_its_end
from loadtest.on_vllm import POLICY_OPTIONS, VllmServer, engine_at, serving
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import REBASE_8, SPRIG, Item, Method, grow, unlike_items
from runtime.openai.openai_engine import OpenaiEngine
from runtime.text import Text
from search.engine import EngineError

COLUMNS = (
    *("searches", "answered", "wrong", "other_digests", "undisturbed_other_digests", "kills"),
    *("refused", "sent_again", "left", "seconds"),
)
AT_ONCE = 6
SHARE = 0.03
"""Of the answers on a wire, that have a fault."""
SILENT_SECONDS = 20.0
"""Of a wire that says nothing any more until it closes."""
PATIENCE_SECONDS = 60.0
"""For a server that works and is silent."""
CALM, AGAIN, FAULTY, KILLS = "undisturbed", "repeated", "faulty", "kills"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a search ended. ``steps``: a digest of its answer and of all of its steps' tokens."""

    error: str = ""
    steps: str = ""
    digest: str = ""
    seconds: float = 0.0


class Searches:
    """Grows searches by their numbers, those that are kept not again."""

    def __init__(self, path: Path | None, items: Sequence[Item]) -> None:
        """``path``: the file of what has ended; none is kept without."""
        self._kept = KeptLines(
            path, REBASE_8.model_dump_json(exclude_none=True), TypeAdapter(Ended)
        )
        self._text = Text(SPRIG.policy)
        self._items = items
        self.done = asyncio.Condition()

    def ended(self, phase: str) -> dict[int, Ended]:
        """What has ended of a phase, by number."""
        kept = {n: self._kept.get(self._name(phase, n)) for n in range(len(self._items))}
        return {number: ended for number, ended in kept.items() if ended is not None}

    async def run(self, phase: str, engine: OpenaiEngine, numbers: Sequence[int]) -> None:
        """Grow those of these numbers that have not ended yet, ``AT_ONCE`` side by side."""
        room, kept = asyncio.Semaphore(AT_ONCE), self.ended(phase)

        async def one(number: int) -> None:
            async with room:
                ended = await self._grow(engine, number)
            self._kept.put(self._name(phase, number), ended)
            say(f"{phase}: {len(self.ended(phase))} of {len(numbers)}, {ended.seconds:.0f} s")
            async with self.done:
                self.done.notify_all()

        await asyncio.gather(*(one(number) for number in numbers if number not in kept))

    @property
    def kills(self) -> int:
        """How often a server was killed under them."""
        kept = self._kept.get(KILLS)
        return 0 if kept is None else round(kept.seconds)

    def note_kill(self) -> None:
        """Once more."""
        self._kept.put(KILLS, Ended(seconds=self.kills + 1))

    async def _grow(self, engine: OpenaiEngine, number: int) -> Ended:
        begun, item = time.monotonic(), self._items[number]
        try:
            outcome = await grow(engine, self._text, item, Method(f"search {number}", REBASE_8))
        except EngineError as error:
            return Ended(error=str(error), seconds=time.monotonic() - begun)
        reply = outcome.answer, [node.tokens for node in outcome.tree.nodes]
        steps = hashlib.sha256(repr(reply).encode()).hexdigest()
        return Ended("", steps, outcome.digest, time.monotonic() - begun)

    def _name(self, phase: str, number: int) -> str:
        return f"{phase} {number} {self._items[number].seed}"


def _engine(policy: str, reward: str) -> AbstractAsyncContextManager[OpenaiEngine]:
    """It waits for a server that starts again."""
    waits = dict.fromkeys(("connect_seconds", "probe_seconds", "stall_seconds"), PATIENCE_SECONDS)
    return engine_at(policy, reward, **waits, recovery_seconds=1800)


async def measure(path: Path | None, count: int, kills: int, repeated: int) -> dict[str, Any]:
    """The row: what is not kept yet is run."""
    searches, begun = Searches(path, unlike_items("game24", count)), time.monotonic()
    policy = VllmServer(Path(SPRIG.policy), POLICY_OPTIONS)
    reward = VllmServer(Path(str(SPRIG.prm)))
    async with serving([policy, reward]):
        async with _engine(policy.url, reward.url) as engine:
            await searches.run(CALM, engine, range(count))
            await searches.run(AGAIN, engine, range(repeated))
        say(f"undisturbed: {time.monotonic() - begun:.0f} s")
        disturbed = await _disturbed(searches, policy, reward, count, kills)
    return {
        "searches": count,
        "width": REBASE_8.width,
        **compared(searches.ended(FAULTY), searches.ended(CALM)),
        "repeated": repeated,
        "undisturbed_other_digests": compared(searches.ended(AGAIN), searches.ended(CALM))[
            "other_digests"
        ],
        **disturbed,
        "seconds": round(time.monotonic() - begun),
    }


async def _disturbed(
    searches: Searches, policy: VllmServer, reward: VllmServer, count: int, kills: int
) -> dict[str, Any]:
    """All searches over wires that fail, to a server that is killed; what was done to them."""
    names = (*TOXICS, SILENCE, TOO_MANY)
    wires = [Proxy(server.port, names=names, silence=SILENT_SECONDS) for server in (policy, reward)]
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(listening(wire.connection)) for wire in wires]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engine = await stack.enter_async_context(_engine(*urls))
        for wire in wires:
            wire.share = SHARE
        killing = asyncio.create_task(_kill(searches, policy, count, kills))
        try:
            await searches.run(FAULTY, engine, range(count))
        except BaseException:
            killing.cancel()
            raise
        killed = await killing
        left = await engine.usage()
    faults = sum((wire.done for wire in wires), start=Counter())
    return {
        "kills": killed,
        "refused": faults.pop(TOO_MANY, 0),
        "faults": dict(faults),
        "sent_again": left.totals.sent_again,
        "left": left.running + left.waiting,
    }


async def _kill(searches: Searches, victim: VllmServer, count: int, kills: int) -> int:
    """Each time another share of the searches has ended, at a random moment; how often."""
    dice = random.Random(0)
    for number in range(searches.kills, kills):
        due = number * count // kills
        async with searches.done:
            await searches.done.wait_for(lambda due=due: len(searches.ended(FAULTY)) >= due)
        await asyncio.sleep(dice.uniform(0.5, 3.0))
        victim.kill()
        searches.note_kill()
        say(f"killed: {number + 1} of {kills}")
        victim.start()
        await asyncio.to_thread(victim.ready)
    return searches.kills


def compared(disturbed: dict[int, Ended], calm: dict[int, Ended]) -> dict[str, Any]:
    """How many had an answer, and how many another one or another tree than ``calm``."""
    pairs = [
        (mine, calm[n]) for n, mine in disturbed.items() if not mine.error and not calm[n].error
    ]
    return {
        "answered": sum(not ended.error for ended in disturbed.values()),
        "errors": sorted({ended.error for ended in disturbed.values() if ended.error}),
        "wrong": sum(mine.steps != other.steps for mine, other in pairs),
        "other_digests": sum(mine.digest != other.digest for mine, other in pairs),
    }


def held(row: dict[str, Any]) -> bool:
    """Whether all searches were answered, none wrong, and nothing is left."""
    return row["answered"] == row["searches"] and not row["wrong"] and not row["left"]


def main() -> None:
    """Print a table, or one JSON document; end with 1 if a search was lost, wrong or left."""
    parser = BenchmarkParser(
        "openai_kills", __doc__, "searches", "keep", quick="6 searches and 1 kill"
    )
    parser.add_argument("--kills", type=at_least(1))
    wanted = parser.parse_args()
    searches = wanted.searches or (6 if wanted.quick else 100)
    kills = wanted.kills or (1 if wanted.quick else 10)
    repeated = max(1, searches // 4)
    row = to_its_end(measure(wanted.kept_in, searches, kills, repeated))
    publish({"rows": [row]}, wanted.json, "vLLM killed under searches", COLUMNS)
    sys.exit(not held(row))


if __name__ == "__main__":
    main()
