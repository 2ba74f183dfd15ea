"""Work that blocks, in a thread beside the event loop, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def thread_in_turn(lock: asyncio.Lock, work: Callable[[], T]) -> T:
    """What ``work`` comes to, whose turn it is when ``lock`` is free; it is done with then, also
    where nobody waits for it any more."""
    async with lock:
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        finally:  # whoever leaves meanwhile does not let the next one in beside the thread
            await asyncio.wait({thread})
            if not thread.cancelled():
                thread.exception()  # where nobody waits, nobody hears of an error
