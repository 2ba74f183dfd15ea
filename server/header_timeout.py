"""A connection on which no whole head of a request comes is closed in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def header_timeout_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which by itself waits for the rest of a head for ever.

    The time begins with the connection, and on one that is kept with the head's first byte.
    """

    class HeaderTimeoutProtocol(H11Protocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _look(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._patience is None:
                self._patience = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

        def _stop(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return HeaderTimeoutProtocol
