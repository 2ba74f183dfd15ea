"""Random searches that are run twice, under any disturbance, and whose trees are compared; and
searches while the disk under the file of trees is full."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

import httpx

from loadtest.hostile.history import HUNG, Asked, StageHistory, checked
from loadtest.searches import side_by_side
from loadtest.served import Served, values
from models.tasks import TASKS
from search.spec import PolicyName, StopReason

SEARCH = "/v1/search"
PATIENCE = 180.0
"""Seconds for a request, far above its deadline."""
STALL_SECONDS = 2.0
STOPPED = {3: STALL_SECONDS / 2, 4: STALL_SECONDS * 2}
"""Of every five kills, those that stop the engine instead, and for how many seconds."""
A_KILL = 15
"""Searches per kill of the engine."""
FLAGS: Sequence[dict[str, Any]] = (
    {},
    {"speculate": "on", "dedup": "off", "kv_tokens": 8192},
    {"draft": "scheduled", "order": "random", "batch_limit": 7, "kv_tokens": 8192},
)
"""Settings of servers, the plain one first: they may change a tree's time, never the tree."""


def drawn(number: int) -> dict[str, Any]:
    """The request body of search ``number``: any policy, width 1 to 12, random parameters."""
    dice = random.Random(number)
    questions = TASKS[dice.choice(sorted(TASKS))].questions("dev", 64)
    search: dict[str, Any] = {
        "policy": dice.choice(get_args(PolicyName)),
        "width": dice.randint(1, 12),
        "seed": dice.randrange(2**31),
        "max_depth": dice.randint(1, 8),
        "deadline_ms": 60_000,
    }
    odd: dict[str, Any] = {
        "temperature": dice.choice([0.0, 0.7, 1.3]),
        "top_p": dice.choice([0.5, 0.95]),
        "max_step_tokens": dice.choice([5, 40]),
        "step_tokens": dice.choice([3, 12]),
        "budget_weight": dice.choice([0.0, 1.7]),
        "reward_temperature": dice.choice([0.05, 1.0]),
        "cost": "tokens",
        "branch": dice.randint(1, 4),
        "parallel": dice.randint(1, 6),
    }
    for name in dice.sample(sorted(odd), dice.randint(0, 3)):
        search[name] = odd[name]
    return {"question": dice.choice(questions), "search": search}


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Asked:
    """Run one search and return how it ended."""
    request, start = json.dumps(body, sort_keys=True), time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            answer = await http.post(SEARCH, json=body)
    except TimeoutError:
        return Asked(request, HUNG, seconds=time.monotonic() - start)
    except httpx.HTTPError:
        return Asked(request, 0, seconds=time.monotonic() - start)
    seconds = time.monotonic() - start
    if answer.status_code != 200:
        error = answer.json().get("error", {}).get("code", "")
        return Asked(request, answer.status_code, error, seconds=seconds)
    reply = answer.json()
    tokens = sum(len(node["tokens"]) for node in reply["tree"]["nodes"])
    billed = reply["usage"]["completion_tokens"]
    late = reply["stop_reason"] == StopReason.DEADLINE
    return Asked(request, 200, "", reply["tree_digest"], billed, tokens, seconds, late)


async def ready(http: httpx.AsyncClient) -> None:
    """Wait until the engine is up, so that no search is refused at once."""
    while (await http.get("/ready")).status_code != 200:
        await asyncio.sleep(0.1)


async def in_company(url: str, numbers: Sequence[int], at_once: int) -> list[Asked]:
    """Run the searches of these numbers, ``at_once`` at a time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:

        async def search_numbered(number: int) -> Asked:
            await ready(http)
            return await ask(http, drawn(number))

        return await side_by_side(search_numbered, numbers, at_once)


def pairs(store: StageHistory, count: int, chunk: int = 50) -> list[Asked]:
    """Run every search on a plain server beside few others, and again on another beside more."""
    history = store.read()
    for begin in range(len(history) // 2, count, chunk):
        numbers = range(begin, min(begin + chunk, count))
        for company, settings in ((3, FLAGS[0]), (12, FLAGS[1 + begin // chunk % 2])):
            with Served(**settings) as served:
                batch = asyncio.run(in_company(served.url, numbers, company))
            history += batch
            store.add(batch)
    return history


def killed(store: StageHistory, count: int) -> list[Asked]:
    """Run searches while the engine is killed or stopped, and all of them again undisturbed."""

    def run() -> list[Asked]:
        with Served(watchdog_seconds=0.2, stall_seconds=STALL_SECONDS) as served:
            disturbed = asyncio.run(_with_kills(served, range(count), count // A_KILL))
            return disturbed + asyncio.run(in_company(served.url, range(count), 4))

    return store.once(run)


FULL = "/dev/full"
"""A file to which writes fail as on a full disk."""


def full_disk(store: StageHistory, count: int) -> list[Asked]:
    """Run ``count`` searches whose trees cannot be written."""

    def run() -> list[Asked]:
        lines: list[str] = []
        with Served("--trees", FULL, on_line=lines.append) as served:
            history = asyncio.run(in_company(served.url, range(count), 4))
            text = httpx.get(f"{served.url}/metrics").text
        store.note(
            counted=sum(values(text, "hedgerow_unwritten_trees_total")),
            told=sum("trees are lost" in line for line in lines),
        )
        return history

    return store.once(run)


def checked_disk(history: list[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that every search is answered, and that lost trees are counted and logged once."""
    answered = sum(entry.status == httpx.codes.OK for entry in history)
    counts = checked(history)
    broken = {
        "unanswered": len(history) - answered,
        "uncounted": answered - facts["counted"],
        "not_told_once": facts["told"] != 1,
    }
    return counts | {"broken": counts["broken"] | broken}


async def _with_kills(served: Served, numbers: Sequence[int], kills: int) -> list[Asked]:
    """Run searches while the engine is killed at random moments, each time once it is up."""
    dice = random.Random(0)

    async def kill() -> None:
        async with httpx.AsyncClient(base_url=served.url) as http:
            for number in range(kills):
                await ready(http)
                await asyncio.sleep(dice.uniform(0.0, 2.0))
                with suppress(ProcessLookupError, ValueError):
                    if number % 5 in STOPPED:
                        engine = served.engine
                        os.kill(engine, signal.SIGSTOP)
                        await asyncio.sleep(STOPPED[number % 5])
                        os.kill(engine, signal.SIGCONT)
                    else:
                        os.kill(served.engine, signal.SIGKILL)

    killing = asyncio.create_task(kill())
    history: list[Asked] = []
    remaining = list(numbers)
    while remaining or not killing.done():
        batch, remaining = remaining[:12], remaining[12:]
        history += await in_company(served.url, batch or list(numbers[:6]), 6)
    await killing
    return history
