"""Limits on incoming connections and bodies: how many there are at once and which are closed when
there are too many, and the bytes and the time of heads, bodies and chunks."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api_errors import ApiError, ClientLeft
from server.settings import Settings

log = logging.getLogger("hedgerow.connections")

LEAST_RESERVED = 128
"""File handles kept for files, the engine's pipe and connections to other servers."""
MOST_AT_ONCE = 2048
"""The most connections that may wait to be accepted."""


class Connections:
    """The open connections, oldest first; ``most`` at once.

    If there are too many, one is closed: the oldest idle one of the address that has most idle
    ones. So a client that opens many does not lock others out. If none is idle the new one is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[GuardedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: GuardedProtocol) -> None:
        """Count a new connection; close one if there are too many now."""
        self._open[connection] = None
        if len(self._open) <= self._most:
            return
        idle = [c for c in self._open if c.idle and c is not connection]
        counts = Counter(c.address for c in (*idle, connection))
        target = max(idle, key=lambda c: counts[c.address], default=connection)
        del self._open[target]
        target.close()

    def closed(self, connection: GuardedProtocol) -> None:
        """Remove a closed connection; further calls do nothing."""
        self._open.pop(connection, None)


def raised_handle_limit() -> int:
    """Raise this process' limit of file handles to the hard limit; return the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            log.warning("file handles: %d; not raised to %d: %s", soft, hard, error)
            return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def accepted_at_once(connections: int, handles: int) -> int:
    """How many connections the event loop may accept before they are counted. For a moment twice as
    many are open beyond ``connections``: the new ones and those that are closed for them."""
    return max(8, min(MOST_AT_ONCE, (handles - connections) // 4))


def within_handles(settings: Settings, handles: int) -> Settings:
    """The settings with no more connections than ``handles`` allow, no more bodies than half of the
    connections, and of one address no more than a quarter. Logs what it lowers."""
    capacity = max(16, handles - max(LEAST_RESERVED, handles // 4))
    connections = min(settings.max_connections, capacity)
    fitting = {
        "max_connections": connections,
        "max_bodies": min(settings.max_bodies, connections // 2),
        "max_bodies_by_address": min(settings.max_bodies_by_address, connections // 4),
    }
    lowered = {name: n for name, n in fitting.items() if n < getattr(settings, name)}
    if lowered:
        summary = ", ".join(f"{name} {n}" for name, n in lowered.items())
        log.warning("%d file handles are too few for the settings: %s", handles, summary)
    return settings.model_copy(update=fitting)


PIECE = 4096
"""The bytes of a chunked body that are parsed at a time."""
MOST_OVERHEAD = 16_384
"""The bytes of chunk headers that a body may have, beyond an eighth of its size."""


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, limited. By itself uvicorn waits for the rest of a head for ever, takes
    any number of connections, and spends as long on a chunk of one byte as on a large one.

    The time for a head starts with the connection, and on a reused one with the head's first byte.
    """

    open_now: ClassVar[Connections]
    head_seconds: ClassVar[float]
    _head_timer: asyncio.TimerHandle | None = None
    _overhead = 0
    _size = 0

    @property
    def address(self) -> str:
        """The client's address, empty if it is unknown."""
        return (self.client or ("",))[0]

    @property
    def idle(self) -> bool:
        """Whether no request is being received or answered: at most a part of a head has come."""
        return self.cycle is None or self.cycle.response_complete

    def close(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and start the timer of its first head."""
        super().connection_made(transport)
        self._look()
        self.open_now.opened(self)

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes, PIECE at a time where they may be chunks."""
        while data and not self.transport.is_closing():
            size = len(data) if self._in_plain_body else PIECE
            self._take(data[:size])
            data = data[size:]
        if not self.transport.is_closing():
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and stop its timer."""
        super().connection_lost(exc)
        self.open_now.closed(self)
        self._stop()

    @property
    def _in_plain_body(self) -> bool:
        """Whether the bytes that come belong to a body that is not chunked."""
        if self.idle or not self.cycle.more_body:
            return False
        return all(name != b"transfer-encoding" for name, _ in self.headers)

    def _take(self, piece: bytes) -> None:
        """Parse a piece. While a body is coming, bytes that are not part of it are counted."""
        cycle = self.cycle
        if self.idle or not cycle.more_body:
            self._overhead = self._size = 0
            super().data_received(piece)
            return
        before = len(cycle.body)
        super().data_received(piece)
        body_bytes = len(cycle.body) - before
        self._size += body_bytes
        self._overhead += len(piece) - body_bytes
        if cycle.more_body and self._overhead > MOST_OVERHEAD + self._size // 8:
            if cycle.response_started:
                self.close()
            else:
                self.send_400_response("The chunks of the body are too small.")

    def _look(self) -> None:
        if not self.idle:
            self._stop()
        elif self._head_timer is None:
            on_timeout = self.timeout_keep_alive_handler
            self._head_timer = self.loop.call_later(self.head_seconds, on_timeout)

    def _stop(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def guarded(connections: Connections, head_seconds: float) -> type[GuardedProtocol]:
    """Create the protocol class of one server."""
    return type(
        "Guarded", (GuardedProtocol,), {"open_now": connections, "head_seconds": head_seconds}
    )


VALUES_A_MESSAGE = 16
"""The values that a body may have for each message that a request may have."""
DIGITS_A_VALUE = 16
QUOTE, BACKSLASH = b'"\\'
COMMAS, DIGITS = b",", b"0123456789"
CLOSE = {"connection": "close"}
"""The header of refusals sent before the whole body has come."""


@dataclass(slots=True, eq=False)
class PartialBody:
    """A body that is not complete: its client's address, its bytes so far and its timeout."""

    address: str
    timeout: asyncio.Timeout
    size: int = 0
    displaced: bool = False


class BodyLimits:
    """The bodies that are not complete yet, oldest first.

    If there are too many, one is dropped: if one address has too many, its oldest; if there are too
    many in all, one of the address that has most, in number or in bytes. So a client that opens
    many does not lock others out.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._partial: dict[PartialBody, None] = {}
        self._by_address: Counter[str] = Counter()
        self._bytes_by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._partial)

    async def whole(self, scope: Scope, receive: Receive) -> bytes:
        """Receive a body that is cheap to parse. Raises ApiError (408, 413, 429) or ClientLeft."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise _too_large(f"{self._settings.max_body_bytes} bytes")
        body = PartialBody((scope.get("client") or ("",))[0], asyncio.timeout(None))
        try:
            async with body.timeout:
                self._enter(body)
                text = await self._read(body, receive)
        except TimeoutError:
            raise self._refusal(body) from None
        finally:
            self._leave(body)
        await self._check_values(text)
        return text

    async def _read(self, body: PartialBody, receive: Receive) -> bytes:
        limits, now = self._settings, asyncio.get_running_loop().time
        end, parts = now() + limits.body_seconds, []
        while not body.displaced:
            body.timeout.reschedule(min(end, now() + limits.body_idle_seconds))
            message = await receive()
            if body.displaced:
                break
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            self._grow(body, len(parts[-1]))
            if body.size > limits.max_body_bytes:
                raise _too_large(f"{limits.max_body_bytes} bytes", CLOSE)
            if not message.get("more_body", False):
                return b"".join(parts)
        raise TimeoutError

    def _enter(self, body: PartialBody) -> None:
        self._partial[body] = None
        self._by_address[body.address] += 1
        if self._by_address[body.address] > self._settings.max_bodies_by_address:
            self._displace(next(h for h in self._partial if h.address == body.address))
        elif len(self._partial) > self._settings.max_bodies:
            self._displace(max(self._partial, key=lambda h: self._by_address[h.address]))

    def _grow(self, body: PartialBody, size: int) -> None:
        body.size += size
        self._bytes_by_address[body.address] += size
        if self._bytes_by_address.total() > self._settings.max_bodies_bytes:
            sizes = self._bytes_by_address
            self._displace(max(self._partial, key=lambda h: (sizes[h.address], h.size)))

    def _displace(self, body: PartialBody) -> None:
        self._leave(body)
        body.displaced = True
        if not body.timeout.expired():
            body.timeout.reschedule(asyncio.get_running_loop().time())

    def _leave(self, body: PartialBody) -> None:
        """Remove a body from the counts; further calls do nothing."""
        if body not in self._partial:
            return
        del self._partial[body]
        self._bytes_by_address[body.address] -= body.size
        self._by_address[body.address] -= 1
        if not self._by_address[body.address]:
            del self._by_address[body.address]
            del self._bytes_by_address[body.address]

    async def _check_values(self, text: bytes) -> None:
        """Raises ApiError (413) for more values or digits than any valid request has: parsing them
        would block all other requests."""
        values = VALUES_A_MESSAGE * self._settings.max_messages
        most = {"values": (COMMAS, values), "digits of numbers": (DIGITS, DIGITS_A_VALUE * values)}
        for name, (byte_set, limit) in most.items():
            if len(text) <= limit or at_most(text, byte_set) <= limit:
                continue
            if await asyncio.to_thread(outside_strings, text, byte_set) > limit:
                raise _too_large(f"{limit} {name}")

    def _refusal(self, body: PartialBody) -> ApiError:
        limits = self._settings
        if body.displaced:
            seconds = limits.retry_after_seconds
            message = f"too many bodies are on their way; come back in {seconds} s"
            headers = CLOSE | {"retry-after": str(seconds)}
            return ApiError(429, "too_many_bodies", message, headers=headers)
        message = (
            f"the body did not come in time: at most {limits.body_idle_seconds:g} s without a byte "
            f"and {limits.body_seconds:g} s in all are allowed"
        )
        return ApiError(408, "request_timeout", message, headers=CLOSE)


def _too_large(most: str, headers: dict[str, str] | None = None) -> ApiError:
    message = f"the body may have at most {most}"
    return ApiError(413, "request_too_large", message, headers=headers or {})


def outside_strings(body: bytes, byte_set: bytes) -> int:
    """How many bytes of ``byte_set`` are outside of the body's JSON strings.

    It takes a few milliseconds where parsing takes tens, and lets other threads run.
    """
    data = np.frombuffer(body, np.uint8)
    quotes = np.flatnonzero(data == QUOTE)
    quotes = quotes[~np.isin(quotes - 1, _escaping(data), assume_unique=True)]
    places = np.flatnonzero(np.isin(data, np.frombuffer(byte_set, np.uint8)))
    before = np.searchsorted(quotes, places)  # number of quotes before; odd: inside a string
    return int(np.count_nonzero(before % 2 == 0))


def at_most(body: bytes, byte_set: bytes) -> int:
    """How many bytes of ``byte_set`` the body has, in strings too: a cheap upper bound."""
    return len(body) - len(body.translate(None, byte_set))


def _escaping(data: np.ndarray) -> np.ndarray:
    """The positions of backslashes that escape the next byte: in a run every second is escaped."""
    slashes = np.flatnonzero(data == BACKSLASH)
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(first, append=len(slashes))
    return slashes[first + lengths - 1][lengths % 2 == 1]
