"""Does a server that is busy for long grow, lose or forget anything?

`python -m loadtest.soak [--minutes M] [--share 0.8] [--json]`. The bundled models behind a server
in a process of its own. First the capacity of a closed loop, then Poisson arrivals at a share of
it: plain replies, searches, streams, and clients that leave midway. Memory is what no file backs,
of the server and its engine, once a second; growth is from the end of the first fifth to the end,
by medians of a tenth each. At the end, when all is quiet, what the engine still holds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from typing import Any

import httpx

from loadtest.options import BenchmarkParser
from loadtest.report import publish
from loadtest.served import Served, closed_loop, open_loop, samples
from models.tasks import TASKS

CHAT = "/v1/chat/completions"
CLIENTS = 8
KV = 8192
"""Small, so that the pool's memory has all been touched when measuring begins."""
HELD = ("hedgerow_searches_in_flight", "hedgerow_branches", "hedgerow_requests_waiting")


class Mixture:
    """Clients of several kinds, and what became of them: ``ends`` by name."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._draw = random.Random(0)
        self._questions = TASKS["game24"].questions("dev", 64)
        self.ends: Counter[str] = Counter()

    async def one(self) -> None:
        """A client; nothing of it goes uncounted."""
        kind = self._draw.choices(["plain", "search", "stream", "leave"], [5, 2, 2, 1])[0]
        body: dict[str, Any] = {"model": "sprig", "max_tokens": 48}
        body["messages"] = [{"role": "user", "content": self._draw.choice(self._questions)}]
        if kind != "plain":
            body["search"] = {"width": 4}
        patience = self._draw.uniform(0.01, 0.5)
        try:
            match kind:
                case "plain" | "search":
                    answer = await self._http.post(CHAT, json=body)
                    self.ends[_end(answer.status_code)] += 1
                case "stream":
                    self.ends[await self._stream(body | {"stream": True})] += 1
                case _:
                    async with asyncio.timeout(patience):
                        await self._http.post(CHAT, json=body)
                    self.ends["answered"] += 1
        except TimeoutError:
            self.ends["left"] += 1
        except httpx.HTTPError:
            self.ends["lost"] += 1

    async def _stream(self, body: dict[str, Any]) -> str:
        last = ""
        async with self._http.stream("POST", CHAT, json=body) as stream:
            async for line in stream.aiter_lines():
                last = line or last
            return "answered" if last == "data: [DONE]" else _end(stream.status_code)


async def soak(minutes: float, share: float) -> dict[str, Any]:
    """The whole document."""
    with Served(kv_tokens=KV, prm_kv_tokens=KV) as served:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
            seconds = 60 * minutes
            asked, took = await closed_loop(Mixture(http).one, CLIENTS, max(5.0, seconds / 10))
            capacity = len(asked) / took
            mixture, memory = Mixture(http), [served.memory()]
            watch = asyncio.create_task(_watch(served, memory))
            await open_loop(mixture.one, share * capacity, seconds, seed=1)
            watch.cancel()
            held = await _held(http)
    fifth, tenth = max(1, len(memory) // 5), max(1, len(memory) // 10)
    start = statistics.median(memory[fifth : fifth + tenth])
    end = statistics.median(memory[-tenth:])
    ends = {name: mixture.ends[name] for name in ("answered", "refused", "left", "lost")}
    return {
        "seconds": round(seconds),
        "capacity_rps": round(capacity, 2),
        "offered_rps": round(share * capacity, 2),
        "requests": mixture.ends.total(),
        **ends,
        "memory_mb_start": round(start / 2**20, 1),
        "memory_mb_end": round(end / 2**20, 1),
        "memory_growth": round(end / start - 1, 4),
        "held": held,
    }


async def _watch(served: Served, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(1)
        memory.append(served.memory())


async def _held(http: httpx.AsyncClient) -> dict[str, float]:
    """What is not zero although nothing is under way; looked at until all is, or for a while."""
    found: dict[str, float] = {}
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        found = {}
        for sample in samples((await http.get("/metrics")).text):
            active = sample.labels.get("state") == "active"
            if sample.value and (sample.name in HELD or active):
                found[f"{sample.name}{sample.labels or ''}"] = sample.value
        if not found:
            break
    return found


def _end(status: int) -> str:
    return "answered" if status == 200 else "refused" if status in (429, 503) else "lost"


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
