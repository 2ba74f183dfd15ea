"""Keeps the engine up: when its process has died, a fresh one is started."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from prometheus_client import Counter

from search.engine import EngineDown, EngineError

log = logging.getLogger("hedgerow.keeper")


class Restartable(Protocol):
    """An engine that can be started again."""

    async def health(self) -> None:
        """Raise EngineDown if the engine is gone or stuck."""
        ...

    async def restart(self) -> None:
        """End it and start a fresh one. Raises EngineError, ValueError or OSError."""
        ...


async def keep_up(engine: Restartable, seconds: float, restarts: Counter, model: str) -> None:
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
