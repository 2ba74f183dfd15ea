"""What a test starts it closes: an engine, a server's connections, a verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Closes(Protocol):
    """What lets go of its processes and connections when told to."""

    async def close(self) -> None:
        """Let go of them."""


T = TypeVar("T", bound=Closes)


@asynccontextmanager
async def closing(started: T) -> AsyncIterator[T]:
    """What was started, until the block is left."""
    try:
        yield started
    finally:
        await started.close()
