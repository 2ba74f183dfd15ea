"""How many connections a server holds, and which of them go when there are too many."""

from __future__ import annotations

import logging
import resource
from collections import Counter
from typing import Protocol

from server.settings import Settings

log = logging.getLogger("hedgerow.connections")

LEAST_RESERVED = 128
"""File handles that are not clients': files, the engine's pipe, connections to other servers."""


MOST_AT_ONCE = 2048
"""Connections that wait to be accepted."""


class Connection(Protocol):
    """What is asked of a client's connection."""

    @property
    def address(self) -> str:
        """Whose it is."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no request is under way on it: at most a part of a head has come."""
        ...

    def close(self) -> None:
        """End it now."""
        ...


class Connections:
    """The connections that are open, oldest first; ``most`` at once.

    Where there are too many, an idle one goes: the oldest of the address that has most of these. So
    whoever opens many of them is in nobody's way. If none is idle the new one goes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Count one; one of those that are open then may be closed."""
        self._open[connection] = None
        if len(self._open) <= self._most:
            return
        idle = [one for one in self._open if one.idle and one is not connection]
        held = Counter(one.address for one in (*idle, connection))
        goes = max(idle, key=lambda one: held[one.address], default=connection)
        del self._open[goes]
        goes.close()

    def closed(self, connection: Connection) -> None:
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
