"""Bodies that keep a server from reading others: never complete ones, and the largest allowed."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx

from loadtest.hostile.bodies import send
from loadtest.hostile.history import HUNG, Asked, StageHistory
from loadtest.hostile.rest import counts_at_rest, more
from loadtest.served import Served

CHAT = "/v1/chat/completions"
SMALL: dict[str, Any] = {
    "model": "sprig",
    "messages": [{"role": "user", "content": "17 + 25"}],
    "max_tokens": 4,
    "seed": 1,
}
IDLE_SECONDS = 5.0
PATIENCE = 60.0
BIG: Sequence[dict[str, Any]] = (
    *(
        SMALL | {"messages": [{"role": "user", "content": content}]}
        for content in ("a" * 1_900_000, "17 + 25 " * 237_500, " " * 1_900_000, "é漢" * 380_000)
    ),
    SMALL | {"messages": [1] * 600_000},
    SMALL | {"search": {str(number): 1 for number in range(150_000)}},
    SMALL | {"search": {str(number): "a" * 100 for number in range(16_000)}},
    SMALL | {"messages": [10**4000] * 60},
    SMALL | {"messages": [10**4000] * 475},
)
"""Bodies of about the largest allowed size, each slow in another way."""
AT_ONCE = 4
SLOWER = 3.0
"""How many times longer a small request may take behind four big ones."""
MB = 100.0
"""Megabytes that allocators may keep after big bodies."""


async def small(http: httpx.AsyncClient, name: str) -> Asked:
    """Send a small request, as other clients do meanwhile."""
    start = time.monotonic()
    try:
        answer = await http.post(CHAT, json=SMALL)
    except httpx.TimeoutException:
        return Asked(name, HUNG, seconds=time.monotonic() - start)
    error = "" if answer.is_success else answer.json()["error"]["code"]
    return Asked(name, answer.status_code, error, seconds=time.monotonic() - start)


def half_bodies(store: StageHistory, count: int) -> list[Asked]:
    """Open ``count`` connections at once with half a body each, from a few addresses, and send
    small requests meanwhile."""

    def run() -> list[Asked]:
        with Served(body_idle_seconds=IDLE_SECONDS) as served:
            base = asyncio.run(counts_at_rest(served))
            history = asyncio.run(_half_bodies(served.url, count))
            store.note(held_more=more(asyncio.run(counts_at_rest(served, base)), base))
        return history

    return store.once(run)


async def _half_bodies(url: str, count: int) -> list[Asked]:
    port = int(url.rpartition(":")[2])
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f'{head}content-length: 400\r\n\r\n{{"model": '.encode()
    over = asyncio.Event()

    async def half(number: int) -> Asked:
        address = f"127.0.0.{2 + number % 4}", 0
        return await send(port, "half", request, PATIENCE, local_addr=address)

    async def others() -> list[Asked]:
        replies = []
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            while not over.is_set():
                replies.append(await small(http, "whole"))
                await asyncio.sleep(0.1)
        return replies

    meanwhile = asyncio.create_task(others())
    halves = await asyncio.gather(*map(half, range(count)))
    over.set()
    return [*halves, *await meanwhile]


def checked_halves(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that half bodies are refused and no other request is."""
    halves = [entry for entry in history if entry.sent == "half"]
    whole = [entry for entry in history if entry.sent == "whole"]
    broken = {
        "half_bodies_without_an_end": sum(entry.status == HUNG for entry in halves),
        "half_bodies_answered": sum(entry.status not in (0, 408, 429) for entry in halves),
        "others_refused": sum(entry.status != httpx.codes.OK for entry in whole),
        **facts["held_more"],
    }
    return {
        "requests": len(halves),
        "others": len(whole),
        "others_slowest": round(max(entry.seconds for entry in whole), 3),
        "broken": broken,
    }


def big_bodies(store: StageHistory, rounds: int) -> list[Asked]:
    """Send four of the largest bodies at once and a small request after them, ``rounds`` times."""

    def run() -> list[Asked]:
        with Served() as served:
            asyncio.run(_big_bodies(served.url, 1))  # warms up
            base = asyncio.run(counts_at_rest(served))
            history, alone = asyncio.run(_big_bodies(served.url, rounds))
            after = asyncio.run(counts_at_rest(served, base))
            store.note(alone=alone, held_more=more(after, base), mb=[base["mb"], after["mb"]])
        return history

    return store.once(run)


async def _big_bodies(url: str, rounds: int) -> tuple[list[Asked], float]:
    """The history, and the seconds that a small request takes alone."""
    form = {"content-type": "application/json"}

    def big(text: bytes) -> Asked:  # in a thread, which sends while others of this process run
        with closing(HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)) as connection:
            connection.request("POST", CHAT, text, form)
            answer = connection.getresponse()
            reply = json.loads(answer.read())
        return Asked("big", answer.status, reply.get("error", {}).get("code", ""))

    dice = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        texts = [json.dumps(body, ensure_ascii=False).encode() for body in BIG]
        alone = statistics.median([(await small(http, "alone")).seconds for _ in range(15)])
        history: list[Asked] = []
        for _ in range(rounds):
            batch = dice.sample(texts, AT_ONCE)
            under_way = [asyncio.create_task(asyncio.to_thread(big, text)) for text in batch]
            await asyncio.sleep(dice.uniform(0.0, 0.2))
            history.append(await small(http, "behind"))
            history += await asyncio.gather(*under_way)
        return history, alone


def checked_big(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that requests after big bodies do not wait for them, and that memory is freed."""
    big = [entry for entry in history if entry.sent == "big"]
    behind = [entry for entry in history if entry.sent == "behind"]
    ratio = statistics.median(entry.seconds for entry in behind) / facts["alone"]
    growth = facts["mb"][1] - facts["mb"][0]
    broken = {
        "big_bodies_not_refused": sum(entry.status not in (400, 413) for entry in big),
        "others_refused": sum(entry.status != httpx.codes.OK for entry in behind),
        "others_slower": ratio > SLOWER,
        "memory_kept": growth > MB,
        **facts["held_more"],
    }
    return {
        "requests": len(big),
        "behind_over_alone": round(ratio, 2),
        "mb": facts["mb"],
        "broken": broken,
    }
