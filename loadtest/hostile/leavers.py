"""Clients that leave at random moments: their requests must end with them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx

from loadtest.hostile.history import Asked, StageHistory
from loadtest.hostile.rest import counts, counts_at_rest, more
from loadtest.searches import side_by_side
from loadtest.served import Served
from models.tasks import TASKS

MAX_RUNNING = 4
AT_ONCE = 24
CHOICES = 4
"""Choices of every plain request, each of which the server counts as a reply."""
CLIENT_GONE = 499
"""The status of a request whose client is gone, as nginx has it."""
GONE_SECONDS = 1.0
PATIENCE = 15.0
LOOK_SECONDS = 0.05
KINDS: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/chat/completions", {"n": CHOICES}),
    ("/v1/chat/completions", {"n": CHOICES, "stream": True}),
    ("/v1/chat/completions", {"search": {"policy": "rebase", "width": 8}}),
    ("/v1/chat/completions", {"search": {"policy": "ets", "width": 16}, "stream": True}),
    ("/v1/search", {"search": {"policy": "beam", "width": 16}}),
    ("/v1/search", {"search": {"policy": "best_of_n", "width": 8}, "stream": True}),
)


@dataclass(slots=True)
class Ends:
    """When the server finished each request, by the id that the client gave it."""

    at: dict[str, float] = field(default_factory=dict)

    def note_line(self, line: str) -> None:
        """Note the end of a request, if this line of the server's log tells of one."""
        if '"hedgerow.access"' in line:
            entry = json.loads(line)
            self.at[entry["request_id"]] = datetime.fromisoformat(entry["time"]).timestamp()


def request(number: int) -> tuple[str, bytes]:
    """The path and body of leaver ``number``."""
    dice = random.Random(number)
    path, more = dice.choice(KINDS)
    question = dice.choice(TASKS["game24"].questions("dev", 64))
    body: dict[str, Any] = {"model": "sprig", "max_tokens": 200, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": question}]
    if path == "/v1/search":
        body = {"question": question}
    return path, json.dumps(body | more).encode()


async def leave(port: int, number: int) -> float:
    """Ask and leave, with a part of the body sent or at some moment after it; the time it left."""
    dice = random.Random(-number - 1)
    path, body = request(number)
    part = body[: dice.randrange(len(body))] if dice.random() < 0.15 else body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"x-request-id: leaver-{number}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + part)
    await writer.drain()
    if part != body or dice.random() < 0.95:
        await asyncio.sleep(10 ** dice.uniform(-3.5, 0.3))
    else:
        await reader.read(1)  # with the first byte of the answer
    if dice.random() < 0.5:  # with a reset, not an orderly close
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    moment = time.time()
    writer.close()
    return moment


async def crowd(served: Served, numbers: Sequence[int], ends: Ends) -> tuple[list[Asked], float]:
    """The leavers' requests, and the most searches that were under way at any look.

    Without those whose answer was there before they left, and those whose request was discarded
    with its connection, unread.
    """
    most, port = 0.0, int(served.url.rpartition(":")[2])

    async def watch() -> None:
        nonlocal most
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            while True:
                now = await counts(http)
                replies = now["replies"]
                most = max(most, now["searches"] - replies + math.ceil(replies / CHOICES))
                await asyncio.sleep(LOOK_SECONDS)

    watching = asyncio.create_task(watch())
    moments = await side_by_side(lambda number: leave(port, number), numbers, AT_ONCE)
    await _wait_for_ends(numbers, ends)
    watching.cancel()
    await asyncio.wait([watching])
    return [
        Asked(request(number)[0], CLIENT_GONE, "left", seconds=ends.at[f"leaver-{number}"] - at)
        for number, at in zip(numbers, moments, strict=True)
        if ends.at.get(f"leaver-{number}", 0.0) > at
    ], most


async def _wait_for_ends(numbers: Sequence[int], ends: Ends) -> None:
    """Wait until no request has ended for a second, PATIENCE at most."""
    last_count, since, until = -1, time.monotonic(), time.monotonic() + PATIENCE
    while time.monotonic() < min(until, since + 1.0):
        count = sum(f"leaver-{number}" in ends.at for number in numbers)
        if count != last_count:
            last_count, since = count, time.monotonic()
        await asyncio.sleep(0.05)


def leavers(store: StageHistory, count: int, chunk: int = 200) -> list[Asked]:
    """Run until ``count`` clients have left while their requests were served."""
    history = store.read()
    if len(history) >= count:
        return history
    ends, facts = Ends(), store.facts
    begin = facts.get("asked", 0)
    settings = {"max_running": MAX_RUNNING, "log_format": "json", "kv_tokens": 16384}
    with Served(on_line=ends.note_line, **settings) as served:
        asyncio.run(crowd(served, range(-2 * AT_ONCE, 0), ends))  # warms up
        base = asyncio.run(counts_at_rest(served))
        while len(history) < count:
            batch, most = asyncio.run(crowd(served, range(begin, begin + chunk), ends))
            begin += chunk
            history += batch
            store.add(batch)
            after = asyncio.run(counts_at_rest(served, base))
            store.note(
                asked=begin,
                most_running=max(most, store.facts.get("most_running", 0)),
                held_more=more(after, base),
                mb=[store.facts.get("mb", [base["mb"]])[0], after["mb"]],
            )
    return history


def checked_leavers(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Counts of the stage; ``broken``: how often each promise was broken."""
    gone = sorted(entry.seconds for entry in history)
    p99 = statistics.quantiles(gone, n=100)[-1]
    broken = {
        "searches_over_max_running": max(0, facts["most_running"] - MAX_RUNNING),
        "gone_too_late": p99 > GONE_SECONDS,
        **facts["held_more"],
    }
    return {
        "requests": facts["asked"],
        "left": len(history),
        "gone_p99_ms": round(1000 * p99),
        "gone_p50_p99_max": [round(each, 3) for each in (statistics.median(gone), p99, gone[-1])],
        "mb": facts["mb"],
        "broken": broken,
    }
