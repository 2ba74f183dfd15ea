"""What does HTTP add to an answer, and how much does an overloaded server still answer?

`python -m loadtest.http [--quick] [--json]`. The bundled models behind the server on a free port of
this machine. First the same plain completions by HTTP, from a client in a process of its own, and
straight from the engine, in turns, at 1 and 32 at once: the difference of the medians. Then Locust
measures a server in a process of its own: its capacity for users who ask without end, and what it
answers, refuses and loses at rates that are shares of that. Answers after the server's own deadline
are ``late``, refusals that do not say when to come back ``unsaid``; neither should occur.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import count
from multiprocessing import get_context
from typing import Any

import httpx
import uvicorn

from loadtest.options import BenchmarkParser
from loadtest.report import publish
from loadtest.served import REFUSED, Served, load_records, load_row
from models.tasks import TASKS
from server.app import create_app
from server.assemble import running
from server.lifecycle import KEEP_ALIVE_SECONDS, listen
from server.request_models import ChatRequest
from server.request_parsing import parse_chat
from server.service import Service, create_service
from server.settings import Settings, load_settings

CHAT = "/v1/chat/completions"
QUESTIONS = TASKS["game24"].questions("dev", 64)
SHARES = (0.5, 1.0, 3.0)
AT_ONCE = (1, 32)
DEADLINE = 60.0
GRACE = 1.0
"""Seconds for an answer on its way."""


_SEEDS = count(1)


def body() -> dict[str, Any]:
    """A short plain completion; every one has a seed of its own."""
    seed = next(_SEEDS)
    messages = [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]
    return {"model": "sprig", "messages": messages, "max_tokens": 16, "seed": seed}


@lru_cache(1)
def _clients_of(url: str) -> tuple[asyncio.Runner, list[httpx.AsyncClient]]:
    """One client per connection, since a client searches its whole pool at every request."""
    tls = ssl.create_default_context()  # unused, but 10 ms to make, so made once
    many = range(max(AT_ONCE))
    return asyncio.Runner(), [
        httpx.AsyncClient(base_url=url, timeout=300, verify=tls) for _ in many
    ]


def burst(url: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds for each body by HTTP, all at once; later calls in the same process use the same
    connections."""
    runner, clients = _clients_of(url)

    async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
        start = time.perf_counter()
        (await client.post(CHAT, json=body)).raise_for_status()
        return time.perf_counter() - start

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*map(post, clients, bodies))

    return runner.run(all_of_them())


async def by_engine(service: Service, body: dict[str, Any]) -> float:
    """Seconds for one body straight from the engine: the chat template and the tree, no HTTP."""
    request = ChatRequest(**body)
    start = time.perf_counter()
    ask = await parse_chat(request, service, service.keys.anybody)
    await service.runner.complete(ask.tree, replace(ask.completions[0][0], seconds=60.0))
    return time.perf_counter() - start


async def added(url: str, service: Service, rounds: int) -> dict[str, float]:
    """Milliseconds that HTTP adds to the median, by the number at once; both ways take turns."""
    loop, extra_ms = asyncio.get_running_loop(), {}
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        for at_once in AT_ONCE:
            over_http: list[float] = []
            direct: list[float] = []
            for _ in range(max(3, rounds // at_once)):
                bodies = [body() for _ in range(at_once)]
                over_http += await loop.run_in_executor(client, burst, url, bodies)
                asks = (by_engine(service, body()) for _ in range(at_once))
                direct += await asyncio.gather(*asks)
            more = statistics.median(over_http) - statistics.median(direct)
            extra_ms[str(at_once)] = round(more * 1000, 3)
    return extra_ms


def offered(url: str, seconds: float, **how: Any) -> dict[str, Any]:
    """The row of plain completions; ``how``: ``users`` or ``rate`` of ``load_records``."""
    records = load_records(url, ("Plain",), seconds, **how)
    unsaid = sum(
        record["status"] in REFUSED and record["retry_after"] is None for record in records
    )
    return load_row(records, DEADLINE + GRACE) | {"unsaid": unsaid}


async def added_alone(rounds: int, **bounds: Any) -> dict[str, float]:
    """Milliseconds that HTTP adds on a server without other load."""
    async with _serving(load_settings(port=0, **bounds)) as (service, url):
        return await added(url, service, rounds)


def measure(quick: bool) -> dict[str, Any]:
    """Measure everything; the whole document."""
    bounds: dict[str, Any] = {"max_running": 64, "max_queued": 64, "deadline_seconds": DEADLINE}
    seconds, rounds = (8.0, 20) if quick else (60.0, 320)
    extra = asyncio.run(added_alone(rounds, **bounds))
    with Served(**bounds) as served:
        capacity = offered(served.url, seconds, users=64)["goodput_rps"]
        rows = [offered(served.url, seconds, rate=share * capacity) for share in SHARES]
    best = max(row["goodput_rps"] for row in rows[:-1])
    return {
        "rows": rows,
        "capacity_rps": capacity,
        "goodput_at_3x_ratio": round(rows[-1]["goodput_rps"] / best, 3) if best else 0.0,
        "added_p50_ms": extra,
    }


@asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[tuple[Service, str]]:
    """Run the server in this event loop; its service and its URL."""
    async with running(settings) as parts:
        service = create_service(settings, parts.engine, parts.text)
        listener = listen(settings.host, 0)
        config = uvicorn.Config(
            create_app(service), log_level="error", timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield service, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


def main() -> None:
    """Print tables, or one JSON document."""
    options = BenchmarkParser("http", __doc__, quick="seconds a part, not a minute").parse_args()
    report = measure(options.quick)
    publish(report, options.json, "HTTP", tuple(report["rows"][0]))
    if not options.json:
        print(
            json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=2)
        )


if __name__ == "__main__":
    main()
