"""The connections that a server holds: how many, which go, and uvicorn's protocol with a door.

Heads come in time, and chunks are no crumbs.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from server.settings import Settings

log = logging.getLogger("hedgerow.connections")

LEAST_RESERVED = 128
"""File handles that are not clients': files, the engine's pipe, connections to other servers."""
MOST_AT_ONCE = 2048
"""Connections that wait to be accepted."""


class Connections:
    """The connections that are open, oldest first; ``most`` at once.

    Where there are too many, an idle one goes: the oldest of the address that has most of these. So
    whoever opens many of them is in nobody's way. If none is idle the new one goes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[GuardedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: GuardedProtocol) -> None:
        """Count one; one of those that are open then may be closed."""
        self._open[connection] = None
        if len(self._open) <= self._most:
            return
        idle = [one for one in self._open if one.idle and one is not connection]
        held = Counter(one.address for one in (*idle, connection))
        goes = max(idle, key=lambda one: held[one.address], default=connection)
        del self._open[goes]
        goes.close()

    def closed(self, connection: GuardedProtocol) -> None:
        """Count one no more; once is enough."""
        self._open.pop(connection, None)


def raised_handle_limit() -> int:
    """The most file handles that this process may have, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            log.warning("file handles: %d; not raised to %d: %s", soft, hard, error)
            return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def accepted_at_once(connections: int, handles: int) -> int:
    """How many connections the event loop may accept before it counts them: for a moment twice as
    many are open beyond those that may be, the new ones and those that go for them."""
    return max(8, min(MOST_AT_ONCE, (handles - connections) // 4))


def within_handles(settings: Settings, handles: int) -> Settings:
    """The settings with no more connections than so many file handles bear, and no more bodies than
    leave half of the connections to others. Logs what it lowers."""
    bear = max(16, handles - max(LEAST_RESERVED, handles // 4))
    connections = min(settings.max_connections, bear)
    fitting = {
        "max_connections": connections,
        "max_bodies": min(settings.max_bodies, connections // 2),
        "max_bodies_by_address": min(settings.max_bodies_by_address, connections // 4),
    }
    lowered = {name: n for name, n in fitting.items() if n < getattr(settings, name)}
    if lowered:
        said = ", ".join(f"{name} {n}" for name, n in lowered.items())
        log.warning("%d file handles are too few for the settings: %s", handles, said)
    return settings.model_copy(update=fitting)


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
        """Whether no request is under way on it: at most a part of a head has come."""
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
