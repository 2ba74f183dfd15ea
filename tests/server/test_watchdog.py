"""An engine that died is started again, and again if the start fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from prometheus_client import CollectorRegistry, Counter

from search.engine import EngineDown
from server.lifecycle import EngineWatch


class Mortal:
    """An engine that is dead until its second restart, which works."""

    def __init__(self) -> None:
        self.dead = True
        self.restarts = 0
        self.back = asyncio.Event()

    async def health(self) -> None:
        """Raise EngineDown while dead."""
        if self.dead:
            raise EngineDown("dead")
        self.back.set()

    async def restart(self) -> None:
        """Fail the first time."""
        self.restarts += 1
        if self.restarts == 1:
            raise OSError("no memory")
        self.dead = False


async def test_a_dead_engine_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A failed restart is tried again; a healthy engine is left alone; restarts are counted and
    logged with the model's name."""
    caplog.set_level(logging.INFO)
    engine = Mortal()
    restarts = Counter("restarts", "", ["served"], registry=CollectorRegistry())
    watchdog = asyncio.create_task(EngineWatch(0.001, 3, restarts).over(engine, "sprig"))  # type: ignore[arg-type]
    await engine.back.wait()
    watchdog.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watchdog
    assert engine.restarts == 2
    assert next(iter(restarts.collect())).samples[0].value == 2
    assert [record.getMessage() for record in caplog.records] == [
        "sprig: dead: restarting the engine",
        "sprig: the engine does not start: no memory",
        "sprig: dead: restarting the engine",
        "sprig: the engine is back",
    ]


async def test_one_that_never_starts_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """After three attempts, each counted; the last log line says so."""

    class Dead(Mortal):
        async def restart(self) -> None:
            raise OSError("no memory")

    restarts = Counter("restarts", "", ["served"], registry=CollectorRegistry())
    async with asyncio.timeout(30):
        await EngineWatch(0.001, 3, restarts).over(Dead(), "sprig")  # type: ignore[arg-type]
    assert next(iter(restarts.collect())).samples[0].value == 3
    assert caplog.messages[-1] == "sprig: given up after 3 restarts that failed"
