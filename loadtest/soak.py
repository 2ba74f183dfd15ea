"""Does a server that is busy for long grow, lose or forget anything?

`python -m loadtest.soak [--minutes M] [--share 0.8] [--json]`. The bundled models behind a server
in a process of its own. First the capacity for users who ask without end, then a share of it by
the clock: plain replies, searches, streams, and clients that leave midway (``Mixture`` and
``Leaver`` of `loadtest/locust_scenarios.py`). Memory is what no file backs, of the server and its
engine, once a second; growth is from the end of the first fifth to the end, by medians of a tenth
each. At the end, when all is quiet, what the engine still holds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import httpx

from loadtest.hostile.rest import counts
from loadtest.options import BenchmarkParser
from loadtest.report import publish
from loadtest.served import Served, asked_by, load_row

MIXTURE = ("Mixture", "Leaver")
USERS = 8
KV = 8192
"""Small, so that the pool's memory has all been touched when measuring begins."""
DEADLINE = 60.0
HELD = ("searches", "branches", "waiting", "kv_tokens")


async def soak(minutes: float, share: float) -> dict[str, Any]:
    """The whole document."""
    seconds = 60 * minutes
    with Served(kv_tokens=KV, prm_kv_tokens=KV) as served:
        asked = asked_by(served.url, MIXTURE, max(5.0, seconds / 10), users=USERS)
        rate = share * load_row(asked, DEADLINE)["offered_rps"]
        memory = [served.memory()]
        watch = asyncio.create_task(_watch(served, memory))
        found = await asyncio.to_thread(asked_by, served.url, MIXTURE, seconds, rate=rate)
        watch.cancel()
        held = await _held(served.url)
    fifth, tenth = max(1, len(memory) // 5), max(1, len(memory) // 10)
    start = statistics.median(memory[fifth : fifth + tenth])
    end = statistics.median(memory[-tenth:])
    stayed = [one for one in found if one["status"] or one["key"] != "leaver"]
    return load_row(stayed, DEADLINE) | {
        "seconds": round(seconds),
        "left": len(found) - len(stayed),
        "memory_mb_start": round(start / 2**20, 1),
        "memory_mb_end": round(end / 2**20, 1),
        "memory_growth": round(end / start - 1, 4),
        "held": held,
    }


async def _watch(served: Served, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(1)
        memory.append(served.memory())


async def _held(url: str) -> dict[str, float]:
    """What is not zero although nothing is under way; looked at until all is, or for a while."""
    until = time.monotonic() + 60
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while True:
            now = await counts(http)
            found = {name: now[name] for name in HELD if now[name]}
            if not found or time.monotonic() > until:
                return found
            await asyncio.sleep(0.1)


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    wanted = parser.parse_args()
    found = asyncio.run(soak(wanted.minutes, wanted.share))
    publish(found | {"rows": [found]}, wanted.json, "A soak", tuple(found))


if __name__ == "__main__":
    main()
