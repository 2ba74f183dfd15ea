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
from loadtest.served import Served, load_records, load_row

MIXTURE = ("Mixture", "Leaver")
USERS = 8
KV = 8192
"""Small, so that the pool's memory has all been touched when measuring begins."""
DEADLINE = 60.0
RESTING_COUNTS = ("searches", "branches", "waiting", "kv_tokens")


async def soak(minutes: float, share: float) -> dict[str, Any]:
    """Load a server for ``minutes``; the whole document."""
    seconds = 60 * minutes
    with Served(kv_tokens=KV, prm_kv_tokens=KV) as served:
        capacity_records = load_records(served.url, MIXTURE, max(5.0, seconds / 10), users=USERS)
        rate = share * load_row(capacity_records, DEADLINE)["offered_rps"]
        memory = [served.memory()]
        watch = asyncio.create_task(_watch(served, memory))
        records = await asyncio.to_thread(load_records, served.url, MIXTURE, seconds, rate=rate)
        watch.cancel()
        residue = await _residue(served.url)
    fifth, tenth = max(1, len(memory) // 5), max(1, len(memory) // 10)
    start = statistics.median(memory[fifth : fifth + tenth])
    end = statistics.median(memory[-tenth:])
    stayed = [record for record in records if record["status"] or record["key"] != "leaver"]
    return load_row(stayed, DEADLINE) | {
        "seconds": round(seconds),
        "left": len(records) - len(stayed),
        "memory_mb_start": round(start / 2**20, 1),
        "memory_mb_end": round(end / 2**20, 1),
        "memory_growth": round(end / start - 1, 4),
        "held": residue,
    }


async def _watch(served: Served, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(1)
        memory.append(served.memory())


async def _residue(url: str) -> dict[str, float]:
    """Counts that are not zero at rest; polled until all are zero, or for a minute."""
    until = time.monotonic() + 60
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while True:
            now = await counts(http)
            residue = {name: now[name] for name in RESTING_COUNTS if now[name]}
            if not residue or time.monotonic() > until:
                return residue
            await asyncio.sleep(0.1)


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    options = parser.parse_args()
    report = asyncio.run(soak(options.minutes, options.share))
    publish(report | {"rows": [report]}, options.json, "A soak", tuple(report))


if __name__ == "__main__":
    main()
