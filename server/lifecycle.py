"""How a server stays up and how it ends: a watchdog over the engine, a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from types import FrameType
from typing import Protocol

import uvicorn
from prometheus_client import Counter

from search.engine import EngineDown, EngineError
from server.service import Service

log = logging.getLogger("hedgerow")


class GracefulServer(uvicorn.Server):
    """After the first signal ``/ready`` is red and new work is refused, while the socket stays open
    and what is under way is finished; what is not after ``drain_seconds`` is ended with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGTERM and SIGINT."""
        if self._until is not None:
            signal.signal(sig, signal.SIG_DFL)  # the engine's process ends with the pipe to it
            signal.raise_signal(sig)
        self._until = time.monotonic() + self._service.settings.drain_seconds
        self._service.draining.set()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to leave."""
        if await super().on_tick(counter):
            return True
        if self._until is None:
            return False
        if counter % 10 == 0:
            log.info("draining: %d requests under way", self._under_way)
        if self._under_way and time.monotonic() < self._until:
            return False
        await self._service.close()
        return True

    @property
    def _under_way(self) -> int:
        """Requests being answered, and searches that go on without one."""
        return max(len(self.server_state.tasks), self._service.admission.open)


class Restartable(Protocol):
    """An engine that can be started again."""

    async def health(self) -> None:
        """Raise EngineDown if the engine is gone or stuck."""
        ...

    async def restart(self) -> None:
        """End it and start a fresh one. Raises EngineError, ValueError or OSError."""
        ...


async def watch_engine(engine: Restartable, seconds: float, restarts: Counter, model: str) -> None:
    """Look after ``model``'s engine every so many seconds, until cancelled; a failed restart is
    repeated.

    Searches under way have failed with EngineDown by then; clients were told when to come back.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await engine.health()
        except EngineDown as down:
            log.error("%s: %s: restarting the engine", model, down)
            restarts.inc()
            try:
                await engine.restart()
                log.info("%s: the engine is back", model)
            except (EngineError, ValueError, OSError) as error:
                log.error("%s: the engine does not start: %s", model, error)
