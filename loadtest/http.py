"""What does HTTP add to an answer, and what is left of a server that is asked for too much?

`python -m loadtest.http [--quick] [--json]`. The bundled models behind the server on a free port of
this machine. First the same plain completions by HTTP, from a client in a process of its own, and
straight from the engine, in turns, at 1 and 32 at once: the difference of the medians. Then, of a
server in a process of its own, the capacity of a closed loop, and open loops (Poisson arrivals) at
shares of it: what is answered, refused and lost, and the ``cores`` that server, engine and
generator took. Answers that came after the server's own deadline are ``late``, refusals that do not
say when to come back ``unsaid``; neither should be.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import httpx
import uvicorn

from loadtest.options import BenchmarkParser
from loadtest.report import publish
from loadtest.served import Served, closed_loop, open_loop, quantile
from models.tasks import TASKS
from server.app import create_app
from server.assemble import RunningModel, running
from server.lifecycle import KEEP_ALIVE_SECONDS, listen
from server.request_models import ChatRequest
from server.request_parsing import parse_chat
from server.service import Service, create_service
from server.settings import Settings, load_settings

CHAT = "/v1/chat/completions"
SHARES = (0.5, 1.0, 3.0)
AT_ONCE = (1, 32)
DEADLINE = 60.0
GRACE = 1.0
"""Seconds for an answer on its way."""


@dataclass(frozen=True, slots=True)
class TimedStatus:
    """A request's status (0: no answer), its seconds, and whether it was told when to come back."""

    status: int
    seconds: float
    retry_after: bool


class Load:
    """Requests to one server, each on a connection that no other one uses just then.

    There is a client a connection: one client's pool is looked through whole for every request,
    which soon costs more than the server does.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[httpx.AsyncClient] = []
        self._tls = ssl.create_default_context()  # unused, but 10 ms to make for every client
        self._questions = TASKS["game24"].questions("dev", 64)
        self.asked = 0

    def body(self) -> dict[str, Any]:
        """A short plain completion; every one has a seed of its own."""
        self.asked += 1
        text = self._questions[self.asked % len(self._questions)]
        messages = [{"role": "user", "content": text}]
        return {"model": "sprig", "messages": messages, "max_tokens": 16, "seed": self.asked}

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        """The answer. Raises httpx.HTTPError where there is none."""
        client = self._idle.pop() if self._idle else self._client()
        try:
            return await client.post(CHAT, json=body)
        finally:
            self._idle.append(client)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=300, verify=self._tls)

    async def ask(self) -> TimedStatus:
        """What becomes of one request."""
        body = self.body()
        began = time.perf_counter()
        with suppress(httpx.HTTPError):
            answer = await self.post(body)
            said = "retry-after" in answer.headers
            return TimedStatus(answer.status_code, time.perf_counter() - began, said)
        return TimedStatus(0, time.perf_counter() - began, False)

    async def close(self) -> None:
        """Give up all connections."""
        for client in self._idle:
            await client.aclose()


async def by_http(load: Load, body: dict[str, Any]) -> float:
    """Seconds for one completion by HTTP."""
    began = time.perf_counter()
    (await load.post(body)).raise_for_status()
    return time.perf_counter() - began


@lru_cache(1)
def _client_of(url: str) -> tuple[asyncio.Runner, Load]:
    return asyncio.Runner(), Load(url)


def burst(url: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds for each of these by HTTP, all at once; a process that calls this again keeps its
    connections."""
    runner, load = _client_of(url)

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(by_http(load, body) for body in bodies))

    return runner.run(all_of_them())


async def by_engine(service: Service, body: dict[str, Any]) -> float:
    """Seconds for one asked of the engine: the chat template and the tree, no HTTP."""
    request = ChatRequest(**body)
    began = time.perf_counter()
    ask = await parse_chat(request, service, service.keys.anybody)
    await service.runner.complete(ask.tree, replace(ask.completions[0][0], seconds=60.0))
    return time.perf_counter() - began


async def added(url: str, service: Service, rounds: int) -> dict[str, float]:
    """Milliseconds that HTTP adds to the median with so many at once, both ways asked in turns."""
    load, loop, found = Load(url), asyncio.get_running_loop(), {}
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        for at_once in AT_ONCE:
            over_http: list[float] = []
            direct: list[float] = []
            for _ in range(max(3, rounds // at_once)):
                bodies = [load.body() for _ in range(at_once)]
                over_http += await loop.run_in_executor(client, burst, url, bodies)
                asks = (by_engine(service, load.body()) for _ in range(at_once))
                direct += await asyncio.gather(*asks)
            more = statistics.median(over_http) - statistics.median(direct)
            found[str(at_once)] = round(more * 1000, 3)
    return found


async def offered(load: Load, rate: float, seconds: float) -> dict[str, Any]:
    """The row of arrivals at ``rate`` a second. What came back late still counts, but not as
    goodput beyond the time that it took."""
    found, took = await open_loop(load.ask, rate, seconds)
    refused = [asked for asked in found if asked.status in (429, 503)]
    answered = sorted(asked.seconds for asked in found if asked.status == 200)
    good = [s for s in answered if s <= DEADLINE + GRACE]
    return {
        "offered_rps": round(len(found) / seconds, 2),
        "goodput_rps": round(len(good) / took, 2),
        "refused": len(refused),
        "unsaid": sum(not asked.retry_after for asked in refused),
        "late": len(answered) - len(good),
        "lost": len(found) - len(refused) - len(answered),
        "p50_ms": round(1000 * quantile(good, 0.5), 1),
        "p99_ms": round(1000 * quantile(good, 0.99), 1),
    }


async def measure(quick: bool) -> dict[str, Any]:
    """The whole document."""
    bounds: dict[str, Any] = {"max_running": 64, "max_queued": 64, "deadline_seconds": DEADLINE}
    seconds, rounds = (8.0, 20) if quick else (60.0, 320)
    settings = load_settings(port=0, **bounds)
    async with running(settings) as parts:
        service, url, stop = await _serve(parts, settings)
        extra = await added(url, service, rounds)
        await stop()
    with Served(**bounds) as served:
        load = Load(served.url)
        await by_http(load, load.body())
        asked, took = await closed_loop(load.ask, 64, seconds)
        capacity = sum(one.status == 200 for one in asked) / took
        rows = []
        for share in SHARES:
            began, before = time.perf_counter(), served.cpu_seconds()
            row = await offered(load, share * capacity, seconds)
            took, spent = time.perf_counter() - began, served.cpu_seconds()
            cores = {name: round((spent[name] - before[name]) / took, 2) for name in spent}
            rows.append(row | {"cores": cores})
        await load.close()
    best = max(row["goodput_rps"] for row in rows[:-1])
    return {
        "rows": rows,
        "capacity_rps": round(capacity, 2),
        "goodput_at_3x_ratio": round(rows[-1]["goodput_rps"] / best, 3) if best else 0.0,
        "added_p50_ms": extra,
    }


async def _serve(
    parts: RunningModel, settings: Settings
) -> tuple[Service, str, Callable[[], Awaitable[None]]]:
    """The server in this event loop, answering: its parts, its URL, and how to stop it."""
    service = create_service(settings, parts.engine, parts.text)
    listener = listen(settings.host, 0)
    config = uvicorn.Config(
        create_app(service), log_level="error", timeout_keep_alive=KEEP_ALIVE_SECONDS
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)

    async def stop() -> None:
        server.should_exit = True
        await serving

    return service, f"http://127.0.0.1:{listener.getsockname()[1]}", stop


def main() -> None:
    """Print tables, or one JSON document."""
    wanted = BenchmarkParser("http", __doc__, quick="seconds a part, not a minute").parse_args()
    found = asyncio.run(measure(wanted.quick))
    publish(found, wanted.json, "HTTP", tuple(found["rows"][0]))
    if not wanted.json:
        print(
            json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=2)
        )


if __name__ == "__main__":
    main()
