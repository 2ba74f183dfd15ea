"""SGLang servers that are killed under streamed searches, and how each stream ended."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from httpx_sse import SSEError, aconnect_sse

from loadtest.hostile.sglang_stub import MortalStub, Stub
from loadtest.on_sglang import START_SECONDS
from loadtest.report import say
from loadtest.searches import side_by_side
from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from runtime.sglang.launched_server import LaunchedServer
from runtime.text import Text

TASK = "game24"
PATIENCE = 3600.0
"""Seconds for a search, fifteen starts of servers on a slow machine included."""
PAUSE = 3.0
"""Seconds at most from a server's start to its next kill."""


class StubVictim(MortalStub):
    """A stub of SGLang that draws by hash."""

    @classmethod
    def of(cls) -> Self:
        """A stub with the bundled policy's tokenizer."""
        return cls(Stub.of(Text(SPRIG_FOLDER / "policy")))

    async def stop(self, *, still: bool) -> None:
        """Stay reachable but silent if ``still``, else answer again."""
        self.still = still


@dataclass(slots=True)
class RealVictim:
    """A real SGLang server."""

    server: LaunchedServer

    @property
    def url(self) -> str:
        """The server's URL."""
        return self.server.url

    async def kill(self) -> None:
        """Kill the server and its process group."""
        self._signal(signal.SIGKILL)
        await asyncio.to_thread(self.server.stop)

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self.server.start()
        await self.server.ready(START_SECONDS)

    async def stop(self, *, still: bool) -> None:
        """Stop all of its processes if ``still``, else let them go on."""
        self._signal(signal.SIGSTOP if still else signal.SIGCONT)

    def _signal(self, sign: signal.Signals) -> None:
        assert self.server.process is not None, "it was started"
        os.killpg(self.server.process.pid, sign)


Victim = StubVictim | RealVictim
"""A server that can be killed, stopped, and started again at the same address."""


async def killed_at_random(servers: Sequence[Victim], kills: Sequence[int]) -> None:
    """Kill and restart each server as often as ``kills`` says, in random order, at random times."""
    dice = random.Random(0)
    order = [victim for victim, often in zip(servers, kills, strict=True) for _ in range(often)]
    dice.shuffle(order)
    for number, victim in enumerate(order, 1):
        await asyncio.sleep(dice.uniform(0.0, PAUSE))
        await victim.kill()
        await victim.start()
        say(f"killed {victim.url}: {number} of {len(order)}")


@dataclass(slots=True)
class StreamEnd:
    """How a streamed search ended. ``cut``: with a gap in its events, or without the last one."""

    number: int
    error: str = ""
    cut: bool = False
    steps: str = ""
    digest: str = ""
    seconds: float = 0.0
    rewards: dict[int, float] = field(default_factory=dict)
    _hash: Any = field(default_factory=hashlib.sha256, repr=False)

    def hear(self, name: str, data: dict[str, Any]) -> None:
        """Note an event; ``steps`` becomes a hash of the drawn tokens and the answer."""
        if name == "expanded":
            self._hash.update(repr((data["parent"], data["child"], data["tokens"])).encode())
        elif name == "scored":
            self.rewards[data["node"]] = data["reward"]
        elif name == "error":
            self.error = str(data["error"]["code"])
        elif name == "done":
            self._hash.update(repr(data["answer"]).encode())
            self.steps, self.digest = self._hash.hexdigest(), str(data["tree_digest"])


def search_body(number: int, deadline: float) -> dict[str, Any]:
    """The request body of search ``number``."""
    questions = TASKS[TASK].questions("test", 100)
    search = {"policy": "rebase", "width": 8, "seed": number, "deadline_ms": round(1000 * deadline)}
    return {"question": questions[number % len(questions)], "search": search, "stream": True}


async def streamed(
    url: str, numbers: Sequence[int], at_once: int, *, deadline: float = PATIENCE
) -> list[StreamEnd]:
    """Stream the searches of these numbers, ``at_once`` at a time; how each of them ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        return await side_by_side(
            lambda number: _stream_search(http, number, deadline), numbers, at_once
        )


async def _stream_search(http: httpx.AsyncClient, number: int, deadline: float) -> StreamEnd:
    end, body, next_id = StreamEnd(number), search_body(number, deadline), 0
    start = time.monotonic()
    try:
        async with aconnect_sse(http, "POST", "/v1/search", json=body) as stream:
            if stream.response.is_error:
                await stream.response.aread()
                end.error = str(stream.response.json()["error"]["code"])
            else:
                async for event in stream.aiter_sse():
                    if not event.data:  # a heartbeat
                        continue
                    end.cut |= event.id != str(next_id)
                    next_id += 1
                    end.hear(event.event, json.loads(event.data))
                end.cut |= not end.steps
    except (httpx.HTTPError, SSEError) as error:
        end.error = end.error or type(error).__name__
    end.seconds = time.monotonic() - start
    return end
