"""Server-sent events: following work that is under way, and ending a stream honestly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi.responses import StreamingResponse

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
    forest: Forest,
    work: Callable[[Callable[[T], None]], Coroutine[Any, Any, R]],
    quiet_seconds: float,
) -> AsyncIterator[T | Silence | Result[R]]:
    """Run ``work(tell)`` and yield what it tells, Silence in between, its Result last.

    Raises what the work raises. A follower that goes away cancels the work, and is counted.
    """
    told: asyncio.Queue[T | _End] = asyncio.Queue()
    task = forest.start(work(told.put_nowait))
    task.add_done_callback(lambda _: told.put_nowait(_End()))
    try:
        while True:
            try:
                item = await asyncio.wait_for(told.get(), quiet_seconds)
            except TimeoutError:
                yield Silence()
                continue
            if isinstance(item, _End):
                break
            yield item
        if task.cancelled():
            raise forest.cancelled()
        yield Result(task.result())
    finally:
        if task.cancel():
            forest.metrics.disconnects.inc()


def event(data: Any, name: str | None = None, number: int | None = None) -> bytes:
    """One server-sent event with JSON data on one line."""
    lines = [f"id: {number}"] if number is not None else []
    if name is not None:
        lines.append(f"event: {name}")
    lines.append(f"data: {on_one_line(data)}")
    return ("\n".join(lines) + "\n\n").encode()


def streaming(events: AsyncIterator[bytes]) -> StreamingResponse:
    """The response that sends these events as they come."""
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)
