"""Who uses the tokenizer when: a long text takes it a while, and keeps no short one waiting."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from runtime.text import Text

if TYPE_CHECKING:
    pass


LONG = 1 << 15
"""Characters from which a text is long; one of them takes tens of milliseconds."""


class Tokenizing:
    """A tokenizer bears one user at a time, in a thread beside the event loop.

    Long texts have one of their own and go one after the other; what they needed is given back.
    """

    def __init__(self) -> None:
        self._short = asyncio.Lock()
        self._long = asyncio.Lock()
        self._other: Text | None = None

    async def run(self, text: Text, size: int, encode: Callable[[Text], list[int]]) -> list[int]:
        """What ``encode`` makes of a text of so many characters."""
        if size < LONG:
            return await _beside(self._short, lambda: encode(text))
        return await _beside(self._long, lambda: self._encode_long(text, encode))

    def _encode_long(self, text: Text, encode: Callable[[Text], list[int]]) -> list[int]:
        if self._other is None:
            self._other = text.another()
        try:
            return encode(self._other)
        finally:
            give_back()


async def _beside(lock: asyncio.Lock, work: Callable[[], list[int]]) -> list[int]:
    async with lock:
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        finally:  # whoever leaves meanwhile does not let the next one in beside the thread
            await asyncio.wait({thread})
            if not thread.cancelled():
                thread.exception()  # where nobody waits for the ids, nobody hears of an error


def give_back() -> None:
    """Return freed memory to the system, where the C library can: it keeps it otherwise."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
