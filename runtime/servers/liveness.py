"""Whether a server can be used: a circuit breaker over its answers and its silence."""

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
"""Paths that SGLang's front end answers even while its scheduler is stuck."""


class Liveness:
    """The breaker opens at the first request that gets no answer or a server fault, and closes when
    the server works again, which is tried at growing intervals.

    A busy server, as with a long prefill, may answer nothing for a while. It is taken to be stuck
    once neither an answer to a health check nor a byte of any answer has come for ``stall``
    seconds.
    """

    def __init__(self, url: str, stall: float) -> None:
        """``stall``: seconds of silence after which the server counts as stuck."""
        self.url = url
        self._stall = stall
        self.failures = 0
        """How often the server was lost."""
        self._up = asyncio.Event()
        self._up.set()
        self._reason = ""
        self._interruptions = 0
        self._silent_since: float | None = None
        self._at_work: set[asyncio.Task[Any]] = set()
        self._revival: asyncio.Task[None] | None = None
        self._closed = False

    async def works(self) -> bool:
        """Whether a lost server can be given requests again. Raises httpx.HTTPError."""
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """Whether the server is given requests."""
        return self._up.is_set()

    @up.setter
    def up(self, up: bool) -> None:
        if up:
            self._up.set()
        else:
            self._up.clear()

    async def until_up(self) -> None:
        """Wait until ``up``."""
        await self._up.wait()

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises ReplicaLost as soon as the server is gone or stuck, even
        if ``work`` would wait longer."""
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
        """For how long the server has owed an answer and sent nothing."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    @property
    def stands_still(self) -> bool:
        """Whether the server has been silent for ``stall`` seconds or longer."""
        return self.silent_seconds() >= self._stall

    async def on_request(self, request: httpx.Request) -> None:
        """httpx's request hook: add routing headers, and note since when an answer is due."""
        request.headers.update(current_headers())
        if self._silent_since is None and request.url.path not in FRONT_END:
            self._silent_since = time.monotonic()

    async def on_answer(self, response: httpx.Response) -> None:
        """httpx's response hook: mark the server alive, unless a health check failed."""
        path = response.request.url.path
        if path not in FRONT_END and not (path == "/health" and response.is_error):
            self.mark_alive()

    def mark_alive(self) -> None:
        """Note that something has come from the server."""
        self._silent_since = None

    def lose(self, reason: httpx.HTTPError | str) -> ReplicaLost:
        """Open the breaker; returns the error to raise. ``reason``: a connection's error, which
        cancels all work on the server, or what the server answered, which cancels nothing else."""
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
        return self._lost_error(suspect=not unreachable or isinstance(reason, httpx.ReadTimeout))

    async def end_revival(self) -> None:
        """Stop trying whether the server works again."""
        self._closed = True
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.wait({self._revival})

    def _end_waiting(self) -> None:
        self._interruptions += 1
        for task in self._at_work - {asyncio.current_task()}:
            task.cancel()

    def _lost_error(self, *, suspect: bool = False) -> ReplicaLost:
        return ReplicaLost(f"{self.url} does not answer ({self._reason})", suspect=suspect)

    async def _revive(self) -> None:
        """Close the breaker once ``works`` says that the server can be used again."""
        waits = list(REVIVAL_WAITS)
        while not self.up:
            await asyncio.sleep(waits.pop(0) if len(waits) > 1 else waits[0])
            try:
                self.up = await self.works()
            except httpx.HTTPError as error:
                silent = isinstance(error, httpx.TimeoutException)
                if not silent or self.stands_still:
                    self._end_waiting()
            except Exception:  # what an odd answer makes of us: the server may still come back
                log.exception("%s: it cannot be told whether it works", self.url)
        log.info("%s answers again", self.url)
