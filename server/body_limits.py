"""Bodies on their way in: bounded in bytes, in time and in number; none has a place yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from server.api_errors import ApiError, ClientLeft
from server.settings import Settings

VALUES_A_MESSAGE = 16
"""That a body may have, for each message that a request may have."""
DIGITS_A_VALUE = 16
QUOTE, BACKSLASH = b'"\\'
COMMAS, DIGITS = b",", b"0123456789"
CLOSE = {"connection": "close"}
"""What is still to come of a body is not waited for."""


@dataclass(slots=True, eq=False)
class PartialBody:
    """A body that is not whole: whose, how much of it is there, how long it is waited for."""

    address: str
    patience: asyncio.Timeout
    size: int = 0
    displaced: bool = False


class BodyLimits:
    """The bodies that are not whole yet, oldest first.

    Where there are too many, room is made for the newest: of one address at the cost of that
    address' oldest, in all at the cost of the address that has most, in number or in bytes. So
    whoever opens many of them is in nobody's way.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._partial: dict[PartialBody, None] = {}
        self._by_address: Counter[str] = Counter()
        self._bytes_by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._partial)

    async def whole(self, scope: Scope, receive: Receive) -> bytes:
        """A request's body, cheap to parse. Raises ApiError (408, 413, 429), or ClientLeft."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise _too_large(f"{self._settings.max_body_bytes} bytes")
        body = PartialBody((scope.get("client") or ("",))[0], asyncio.timeout(None))
        try:
            async with body.patience:
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
            body.patience.reschedule(min(end, now() + limits.body_idle_seconds))
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
            held = self._bytes_by_address
            self._displace(max(self._partial, key=lambda h: (held[h.address], h.size)))

    def _displace(self, body: PartialBody) -> None:
        self._leave(body)
        body.displaced = True
        if not body.patience.expired():
            body.patience.reschedule(asyncio.get_running_loop().time())

    def _leave(self, body: PartialBody) -> None:
        """Count it no more; once is enough."""
        if body not in self._partial:
            return
        del self._partial[body]
        self._bytes_by_address[body.address] -= body.size
        self._by_address[body.address] -= 1
        if not self._by_address[body.address]:
            del self._by_address[body.address]
            del self._bytes_by_address[body.address]

    async def _check_values(self, text: bytes) -> None:
        """Raises ApiError (413) for more to parse than any request has: nobody else's request could
        go on meanwhile."""
        values = VALUES_A_MESSAGE * self._settings.max_messages
        most = {"values": (COMMAS, values), "digits of numbers": (DIGITS, DIGITS_A_VALUE * values)}
        for name, (which, allowed) in most.items():
            if len(text) <= allowed or at_most(text, which) <= allowed:
                continue
            if await asyncio.to_thread(outside_strings, text, which) > allowed:
                raise _too_large(f"{allowed} {name}")

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


def outside_strings(body: bytes, which: bytes) -> int:
    """How many of ``which`` bytes stand outside of the body's strings.

    What the body's parser would need tens of milliseconds for takes a few, beside other threads.
    """
    data = np.frombuffer(body, np.uint8)
    quotes = np.flatnonzero(data == QUOTE)
    quotes = quotes[~np.isin(quotes - 1, _escaping(data), assume_unique=True)]
    found = np.flatnonzero(np.isin(data, np.frombuffer(which, np.uint8)))
    before = np.searchsorted(quotes, found)  # quotes; after an odd number of them a string is open
    return int(np.count_nonzero(before % 2 == 0))


def at_most(body: bytes, which: bytes) -> int:
    """How many of ``which`` bytes there are, those in strings too: a cheap bound."""
    return len(body) - len(body.translate(None, which))


def _escaping(data: np.ndarray) -> np.ndarray:
    """Where backslashes stand that escape the next byte: each second one of a run is escaped."""
    slashes = np.flatnonzero(data == BACKSLASH)
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(first, append=len(slashes))
    return slashes[first + lengths - 1][lengths % 2 == 1]
