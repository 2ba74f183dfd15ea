"""Work for a client that may leave before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from server.errors import ClientLeft
from server.forest import Forest

T = TypeVar("T")


async def run_for(request: Request, forest: Forest, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result, watching the connection meanwhile.

    A handler alone never learns that its client has left. The request's body must have been read.
    Raises ClientLeft after cancelling the work, Deleted or Stopped if somebody else cancelled it.
    """
    task = forest.start(work)
    watch = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise ClientLeft
        if task.cancelled():
            raise forest.cancelled()
        return task.result()
    finally:
        watch.cancel()
        task.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
