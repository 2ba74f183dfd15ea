"""Close what a test starts: an engine, a server's connections, a verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Closes(Protocol):
    """An object with processes or connections and an async ``close``."""

    async def close(self) -> None:
        """End the processes and connections."""


T = TypeVar("T", bound=Closes)


@asynccontextmanager
async def closing(started: T) -> AsyncIterator[T]:
    """Yield ``started`` and close it when the block is left."""
    try:
        yield started
    finally:
        await started.close()
