"""How a server ends: the first signal drains it, the second stops it at once."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

import uvicorn

from server.service import Service

log = logging.getLogger("hedgerow")


class DrainingServer(uvicorn.Server):
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
