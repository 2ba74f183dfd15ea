"""The events of a background search, kept so that they can be read from any number on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from server.stream import event

HEARTBEAT = b": still searching\n\n"


class Feed:
    """Server-sent events numbered from 0; any number of readers, who may come and go."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
        self.size = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, name: str, data: dict[str, Any], *, last: bool = False) -> None:
        """Keep an event and wake the readers."""
        if self._ended:
            return
        self._events.append(event(data, name, len(self._events)))
        self.size += len(self._events[-1])
        self._ended = last
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int, quiet_seconds: float) -> AsyncGenerator[bytes, None]:
        """The events after number ``after``, those that are still to come included."""
        at = after + 1
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self._ended:
                return
            try:
                async with asyncio.timeout(quiet_seconds):
                    await self._news.wait()
            except TimeoutError:
                yield HEARTBEAT
