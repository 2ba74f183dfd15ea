"""Is anything lost when what a search runs on dies? Searches, their streams, deadlines, processes.

- ``servers``: streamed searches, eight at once, over the only server of each kind, which are killed
  at random moments and start again. ``lost``: searches that ended with an error; ``cut``: streams
  with a gap or without their last event; ``different``: other steps or another answer than
  undisturbed; ``other_digests``: rewards included, of which ``turned`` of ``rewards`` differ, by at
  most ``most_apart``: SGLang's arithmetic depends on its batches (`loadtest.sglang_rewards`).
- ``deadlines``: searches over a server that is stopped; ``late_ms``: the latest answer after its
  deadline.
- ``hedgerow``: ``hedgerow serve --launch`` is killed at random moments, its start included.
  ``left``: processes 10 s after a kill; ``failed``: starts after a kill that came to nothing.

Real SGLang of the bundled models on this machine's CPU, or with ``--stub`` a stub that speaks as it
does and draws by hash. ``--row`` runs some of them alone.

    python -m loadtest.sglang_lost [--stub] [--quick] [--row servers,deadlines,hedgerow] [--json]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from loadtest.hostile.killed_servers import (
    PATIENCE,
    RealVictim,
    StreamEnd,
    StubVictim,
    Victim,
    killed_at_random,
    streamed,
)
from loadtest.hostile.killed_starts import killed_starts
from loadtest.on_sglang import PYTHON, policy_server, reward_server, started, to_its_end
from loadtest.options import BenchmarkParser, listed
from loadtest.report import publish, say
from loadtest.served import Served

COLUMNS = (
    *("row", "searches", "lost", "cut", "different", "other_digests", "rewards", "turned"),
    *("most_apart", "kills", "late_ms", "left", "failed", "seconds"),
)
AT_ONCE = 8
POOL_TOKENS = 20_000
STALL_SECONDS = 3.0
DEADLINE_SECONDS = 2.0
MOST_LATE_MS = 250.0
ROWS = ("servers", "deadlines", "hedgerow")


async def server_pair(stub: bool, ends: AsyncExitStack) -> tuple[Victim, Victim]:
    """The policy's server and the reward model's, which end with ``ends``."""
    if stub:
        stubs = StubVictim.of(), StubVictim.of()
        for victim in stubs:
            await victim.start()
            ends.push_async_callback(victim.kill)
        return stubs
    servers = policy_server(PYTHON, "arborkv", POOL_TOKENS), reward_server(PYTHON, POOL_TOKENS)
    await ends.enter_async_context(started(servers))
    return RealVictim(servers[0]), RealVictim(servers[1])


def serving(policy: Victim, reward: Victim) -> Served:
    """Start Hedgerow over these servers."""
    return Served(
        engine="sglang",
        policy_urls=policy.url,
        reward_urls=reward.url,
        stall_seconds=STALL_SECONDS,
        deadline_seconds=PATIENCE,
        recovery_seconds=PATIENCE,
    )


async def servers_row(stub: bool, searches: int, kills: tuple[int, int]) -> dict[str, Any]:
    """Run all searches undisturbed, then again while the servers are killed ``kills`` times."""
    async with AsyncExitStack() as ends:
        policy, reward = await server_pair(stub, ends)
        served = await asyncio.to_thread(serving, policy, reward)
        ends.push_async_callback(asyncio.to_thread, served.stop)
        calm = await streamed(served.url, range(searches), AT_ONCE)
        say(f"{searches} searches in peace")
        start = time.monotonic()
        killing = asyncio.create_task(killed_at_random((policy, reward), kills))
        streams = await streamed(served.url, range(searches), AT_ONCE)
        while not killing.done():  # searches until all kills are done, however quick they are
            streams += await streamed(served.url, range(AT_ONCE), AT_ONCE)
        await killing
    seconds = time.monotonic() - start
    return {"row": "servers", "kills": sum(kills)} | loss_counts(streams, calm, seconds)


def loss_counts(
    streams: Sequence[StreamEnd], calm: Sequence[StreamEnd], seconds: float
) -> dict[str, Any]:
    """Counts of how searches ended and how they differ from the same ones undisturbed."""
    calm_by_number = {end.number: end for end in calm}
    whole = [end for end in streams if not end.error and not end.cut]
    same = [end for end in whole if end.steps == calm_by_number[end.number].steps]
    apart = [
        abs(reward - calm_by_number[end.number].rewards[node])
        for end in same
        for node, reward in end.rewards.items()
    ]
    return {
        "searches": len(streams),
        "lost": sum(bool(end.error) for end in streams),
        "lost_in_peace": sum(bool(end.error) for end in calm),
        "cut": sum(end.cut for end in streams),
        "different": len(whole) - len(same),
        "other_digests": sum(end.digest != calm_by_number[end.number].digest for end in whole),
        "rewards": len(apart),
        "turned": sum(map(bool, apart)),
        "most_apart": round(max(apart, default=0.0), 8),
        "errors": sorted({end.error for end in streams if end.error}),
        "seconds": round(seconds, 1),
    }


async def deadlines_row(stub: bool, searches: int) -> dict[str, Any]:
    """Run searches with a deadline while each server in turn is stopped."""
    late: list[float] = []
    async with AsyncExitStack() as ends:
        pair = await server_pair(stub, ends)
        served = await asyncio.to_thread(serving, *pair)
        ends.push_async_callback(asyncio.to_thread, served.stop)
        start = time.monotonic()
        for victim in pair:
            await victim.stop(still=True)
            streams = await streamed(
                served.url, range(searches), AT_ONCE, deadline=DEADLINE_SECONDS
            )
            await victim.stop(still=False)
            late += [1000 * (end.seconds - DEADLINE_SECONDS) for end in streams]
            await streamed(served.url, range(1), 1)
    row = {"row": "deadlines", "searches": len(late), "late_ms": round(max(late), 1)}
    return row | {"seconds": round(time.monotonic() - start, 1)}


async def hedgerow_row(stub: bool, kills: int) -> dict[str, Any]:
    """Kill ``hedgerow serve --launch`` ``kills`` times."""
    with tempfile.TemporaryDirectory() as folder:
        python = None if stub else PYTHON
        return await killed_starts(python, Path(folder), kills)


async def measure(rows: Sequence[str], stub: bool, quick: bool) -> list[dict[str, Any]]:
    """Measure the rows of these names."""
    measured_rows = []
    if "servers" in rows:
        searches, kills = (40, (3, 2)) if quick else (300, (10, 5))
        measured_rows.append(await servers_row(stub, searches, kills))
    if "deadlines" in rows:
        measured_rows.append(await deadlines_row(stub, 8 if quick else 32))
    if "hedgerow" in rows:
        measured_rows.append(await hedgerow_row(stub, 4 if quick else 20))
    return [dict.fromkeys(COLUMNS) | row for row in measured_rows]


def held(row: dict[str, Any]) -> bool:
    """Whether nothing was lost or late, and nothing is left."""
    bad = ("lost", "cut", "different", "left", "failed")
    return not any(row[name] for name in bad) and (row["late_ms"] or 0.0) <= MOST_LATE_MS


def main() -> None:
    """Print a table, or one JSON document; end with 1 if anything was lost."""
    parser = BenchmarkParser("sglang_lost", __doc__, quick="40 searches, 5 kills; 4 of Hedgerow")
    parser.add_argument("--stub", action="store_true", help="no SGLang: what speaks as it does")
    parser.add_argument("--row", type=listed(str, ROWS), default=list(ROWS))
    options = parser.parse_args()
    rows = to_its_end(measure(options.row, options.stub, options.quick))
    publish({"rows": rows}, options.json, "What is lost", COLUMNS)
    sys.exit(not all(map(held, rows)))


if __name__ == "__main__":
    main()
