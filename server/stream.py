"""Server-sent events: following work that is under way, and ending a stream honestly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.admission import Ticket
from server.forest import Forest

T = TypeVar("T")
R = TypeVar("R")

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
on_one_line = json.JSONEncoder(separators=(",", ":")).encode
"""Made once; ``json.dumps`` makes its encoder anew for every event."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for a while."""


@dataclass(frozen=True, slots=True)
class Result(Generic[R]):
    """The work is done; the last thing a follower sees."""

    value: R


@dataclass(frozen=True, slots=True)
class _End:
    pass


async def follow(
    ticket: Ticket,
    forest: Forest,
    work: Callable[[Callable[[T], None]], Coroutine[Any, Any, R]],
    quiet_seconds: float,
) -> AsyncIterator[T | Silence | Result[R]]:
    """Run ``work(tell)`` under the ticket and yield what it tells, Silence in between, its Result
    last. Raises what the work raises.
    """
    told: asyncio.Queue[T | _End] = asyncio.Queue()
    task = forest.start(work(told.put_nowait), ticket)
    task.add_done_callback(lambda _: told.put_nowait(_End()))
    while True:
        try:
            async with asyncio.timeout(quiet_seconds):
                item = await told.get()
        except TimeoutError:
            yield Silence()
            continue
        if isinstance(item, _End):
            break
        yield item
    if task.cancelled():
        raise forest.cancelled()
    yield Result(task.result())


def event(data: Any, name: str | None = None, number: int | None = None) -> bytes:
    """One server-sent event with JSON data on one line."""
    lines = [f"id: {number}"] if number is not None else []
    if name is not None:
        lines.append(f"event: {name}")
    lines.append(f"data: {on_one_line(data)}")
    return ("\n".join(lines) + "\n\n").encode()


class Events(StreamingResponse):
    """Sends events as they come, until it is cancelled: the gate sees to that."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        async with aclosing(self._events):
            await self.stream_response(send)
