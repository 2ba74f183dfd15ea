"""Whether a server is there: a circuit breaker over what it answers and how long it is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx

from runtime.servers.routing import current_headers
from runtime.servers.server_errors import ReplicaLost
from runtime.servers.waiting import reason_of

T = TypeVar("T")

log = logging.getLogger(__name__)

REVIVAL_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
FRONT_END = frozenset({"/metrics", "/abort_request"})
"""What SGLang's front end answers though its scheduler stands still."""


class Liveness:
    """The breaker opens with the first request that the server leaves without an answer, or answers
    with a fault of its own, and closes when it works again, which is tried now and then.

    A server that is busy, as with a long prefill, may leave everything without an answer for a
    while: it stands still once neither a look at its health nor a byte of an answer has come from
    it for longer than that.
    """

    def __init__(self, url: str, stall: float) -> None:
        """``stall``: seconds of silence after which it stands still."""
        self.url = url
        self._stall = stall
        self.failures = 0
        """How often it was lost."""
        self._up = asyncio.Event()
        self._up.set()
        self._reason = ""
        self._interruptions = 0
        self._silent_since: float | None = None
        self._at_work: set[asyncio.Task[Any]] = set()
        self._revival: asyncio.Task[None] | None = None
        self._closed = False

    async def works(self) -> bool:
        """Whether a server that was lost may have work again. Raises httpx.HTTPError."""
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """Whether it gets work."""
        return self._up.is_set()

    @up.setter
    def up(self, up: bool) -> None:
        if up:
            self._up.set()
        else:
            self._up.clear()

    async def until_up(self) -> None:
        """Waits until it gets work."""
        await self._up.wait()

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` comes to. Raises ReplicaLost as soon as the server is gone or stands still,
        whatever ``work`` then waits for."""
        task, before = asyncio.ensure_future(work), self._interruptions
        self._at_work.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._interruptions == before or (caller is not None and caller.cancelling()):
                raise
            raise self._lost_error() from None
        finally:
            self._at_work.discard(task)

    def silent_seconds(self) -> float:
        """How long nothing has come from the server although it was asked."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    @property
    def stands_still(self) -> bool:
        """Whether it is silent for too long."""
        return self.silent_seconds() >= self._stall

    async def on_request(self, request: httpx.Request) -> None:
        """A request goes out."""
        request.headers.update(current_headers())
        if self._silent_since is None and request.url.path not in FRONT_END:
            self._silent_since = time.monotonic()

    async def on_answer(self, response: httpx.Response) -> None:
        """An answer begins; that of a look at its health says itself whether it is one of life."""
        path = response.request.url.path
        if path not in FRONT_END and not (path == "/health" and response.is_error):
            self.mark_alive()

    def mark_alive(self) -> None:
        """Something has come from the server."""
        self._silent_since = None

    def lose(self, reason: httpx.HTTPError | str) -> ReplicaLost:
        """Open the breaker. ``reason``: what went wrong on the way, which ends all that waits for
        the server; or what the server itself answered, which the others may still get otherwise."""
        unreachable = not isinstance(reason, str)
        self._reason = reason_of(reason) if isinstance(reason, httpx.HTTPError) else reason
        if self.up:
            log.error("%s does not answer (%s)", self.url, self._reason)
            self.up = False
            self.failures += 1
            if not self._closed:
                self._revival = asyncio.create_task(self._revive())
        if unreachable:
            self._silent_since = None
            self._end_waiting()
        return self._lost_error(answered=not unreachable)

    async def end_revival(self) -> None:
        """Nobody looks any more whether it works again."""
        self._closed = True
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.wait({self._revival})

    def _end_waiting(self) -> None:
        self._interruptions += 1
        for task in self._at_work - {asyncio.current_task()}:
            task.cancel()

    def _lost_error(self, *, answered: bool = False) -> ReplicaLost:
        return ReplicaLost(f"{self.url} does not answer ({self._reason})", answered=answered)

    async def _revive(self) -> None:
        """Close the breaker when the server works again, and is the one it was."""
        waits = list(REVIVAL_WAITS)
        while not self.up:
            await asyncio.sleep(waits.pop(0) if len(waits) > 1 else waits[0])
            try:
                self.up = await self.works()
            except httpx.HTTPError as error:
                silent = isinstance(error, httpx.TimeoutException)
                if not silent or self.stands_still:
                    self._end_waiting()
        log.info("%s answers again", self.url)
