"""uvicorn's protocol with a door: heads come in time, chunks are no crumbs, connections bounded."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from server.connections import Connections

PIECE = 4096
"""Bytes of the wire that are looked at together."""
MOST_OVERHEAD = 16_384
"""Bytes of chunks' own lines that a body may have, beyond an eighth of its own."""


class GuardedProtocol(H11Protocol):
    """By itself uvicorn waits for the rest of a head for ever, bears any number of connections, and
    spends as long on a chunk of one byte as on a large one.

    The time for a head begins with the connection, and on one that is kept with its first byte.
    """

    open_ones: ClassVar[Connections]
    head_seconds: ClassVar[float]
    _patience: asyncio.TimerHandle | None = None
    _overhead = 0
    _size = 0

    @property
    def address(self) -> str:
        """Whose connection it is."""
        return (self.client or ("",))[0]

    @property
    def idle(self) -> bool:
        """Whether no request is under way on it."""
        return self.cycle is None or self.cycle.response_complete

    def close(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it."""
        super().connection_made(transport)
        self._look()
        self.open_ones.opened(self)

    def data_received(self, data: bytes) -> None:
        """Take what has come, a piece at a time where it may be chunks."""
        while data and not self.transport.is_closing():
            size = len(data) if self._in_plain_body else PIECE
            self._take(data[:size])
            data = data[size:]
        if not self.transport.is_closing():
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        super().connection_lost(exc)
        self.open_ones.closed(self)
        self._stop()

    @property
    def _in_plain_body(self) -> bool:
        """Whether a body comes that is not in chunks."""
        if self.idle or not self.cycle.more_body:
            return False
        return all(name != b"transfer-encoding" for name, _ in self.headers)

    def _take(self, piece: bytes) -> None:
        """Hand a piece on. Of a body that is still coming, what is no part of it is counted."""
        cycle = self.cycle
        if self.idle or not cycle.more_body:
            self._overhead = self._size = 0
            super().data_received(piece)
            return
        before = len(cycle.body)
        super().data_received(piece)
        grown = len(cycle.body) - before
        self._size += grown
        self._overhead += len(piece) - grown
        if cycle.more_body and self._overhead > MOST_OVERHEAD + self._size // 8:
            if cycle.response_started:
                self.close()
            else:
                self.send_400_response("The chunks of the body are too small.")

    def _look(self) -> None:
        if not self.idle:
            self._stop()
        elif self._patience is None:
            late = self.timeout_keep_alive_handler
            self._patience = self.loop.call_later(self.head_seconds, late)

    def _stop(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def guarded(connections: Connections, head_seconds: float) -> type[GuardedProtocol]:
    """The protocol of one server."""
    return type(
        "Guarded", (GuardedProtocol,), {"open_ones": connections, "head_seconds": head_seconds}
    )
