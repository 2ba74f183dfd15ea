"""Who uses the tokenizer when: a long text takes it a while, and keeps no short one waiting."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass


class ChatText(Protocol):
    """What is needed of the policy model's tokenizer."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the messages under the chat template, ready for a reply."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone, nothing added."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The same. This and ``encode_chat`` may raise PrefixTooLong for what cannot fit."""
        ...

    def another(self) -> ChatText:
        """The same, for use in another thread."""
        ...


LONG = 1 << 15
"""Characters from which a text is long; one of them takes tens of milliseconds."""


class Tokenizing:
    """A tokenizer bears one user at a time, in a thread beside the event loop.

    Long texts have one of their own and go one after the other; what they needed is given back.
    """

    def __init__(self) -> None:
        self._short = asyncio.Lock()
        self._long = asyncio.Lock()
        self._other: ChatText | None = None

    async def run(
        self, text: ChatText, size: int, encode: Callable[[ChatText], list[int]]
    ) -> list[int]:
        """What ``encode`` makes of a text of so many characters."""
        if size < LONG:
            return await _beside(self._short, lambda: encode(text))
        return await _beside(self._long, lambda: self._encode_long(text, encode))

    def _encode_long(self, text: ChatText, encode: Callable[[ChatText], list[int]]) -> list[int]:
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
