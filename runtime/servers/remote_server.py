"""A server that runs elsewhere: its connections, its health, and what it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from runtime.servers.liveness import Liveness
from runtime.servers.server_errors import CUT_OFF, FULL, TOO_MANY, WrongServer, refusal_message
from runtime.servers.server_metrics import ServerMetrics
from runtime.servers.waiting import full_waits, reason_of, retry_after, speaks_otherwise
from search.engine import EngineDown, EngineError

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 2.0
"""Below the servers' own 5 s, so that a connection that they are closing is not reused."""
MOST_PORT = 65_535
LOOK = 1.0
"""Most seconds that ``check`` waits for a health check."""


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Limits in seconds: to connect, for an answer, for a health check, and for silence."""

    connect: float = 10.0
    answer: float = 600.0
    probe: float = 20.0
    stall: float = 30.0


class RemoteServer(Liveness):
    """Requests to one server, and checks of its health at the path ``health``. ``kind``: of server
    that is needed; ``stranger``: the error to raise for another kind."""

    health = "/health"
    kind = "HTTP"
    stranger: type[WrongServer] = WrongServer

    def __init__(self, url: str, times: ServerTimes, headers: dict[str, str] | None = None) -> None:
        """``headers``: of every request, such as a key. Connects to nothing yet."""
        super().__init__(url.rstrip("/"), times.stall)
        self.wrong = ""
        """Why the server is given no requests although it answers; empty if it is the right one."""
        self.kv_tokens = 0
        """The capacity of its KV in tokens; 0 if it is not known."""
        self.full_waits: Callable[[], Iterable[float]] = partial(full_waits, times.answer)
        self._probe = times.probe
        self._answer = times.answer
        self._look: asyncio.Task[None] | None = None
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(times.answer, connect=times.connect, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
            trust_env=False,
            event_hooks={"request": [self.on_request], "response": [self.on_answer]},
        )

    async def meet(self) -> None:
        """Learn what the server is. Raises EngineDown; WrongServer if it is not the one needed."""
        raise NotImplementedError

    async def fits(self) -> bool:
        """Whether a server that answers again is the right one, by ``meet``; logs a fault once."""
        wrong = ""
        try:
            await self.meet()
        except WrongServer as error:
            wrong = str(error)
        except EngineDown:
            return False
        if wrong and wrong != self.wrong:
            log.error("it gets no work: %s", wrong)
        self.wrong = wrong
        return not wrong

    async def metrics(self) -> ServerMetrics:
        """The server's own counts. Raises EngineDown."""
        raise NotImplementedError

    async def release(self, tree: str) -> None:
        """Tell the server that a search is over and its KV may be freed; by default nothing."""

    async def check(self) -> None:
        """Check the server's health; ``up`` holds the outcome.

        A busy server may take longer than a second to answer: this waits for one second only, and
        the health check goes on in the background.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_once())
        await asyncio.wait({self._look}, timeout=LOOK)
        if self.stands_still:
            self.lose(httpx.ReadTimeout("silent"))

    async def wait_full(self, seconds: float) -> None:
        """Wait before the next attempt. Raises ReplicaLost if the server was lost meanwhile."""
        await asyncio.sleep(seconds)
        if not self.up:
            raise self._lost_error()

    async def close(self) -> None:
        """Close all connections."""
        await self.end_revival()
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})
        await self._client.aclose()

    async def _look_once(self) -> None:
        try:
            response = await self._request("GET", self.health, timeout=self._probe)
            if response.is_error and response.status_code != TOO_MANY:  # 429 is from a front end
                self.lose(f"status {response.status_code} of {self.health}")
        except httpx.ReadTimeout:
            pass  # silent so far
        except httpx.HTTPError as error:
            self.lose(error)

    async def _get(self, path: str) -> httpx.Response:
        """GET a path. Raises EngineDown, and ``stranger`` if what answers does not speak HTTP."""
        try:
            return await self._request("GET", path, timeout=self._probe)
        except httpx.TimeoutException as error:  # busy, not lost: it may still answer requests
            raise EngineDown(f"{self.url} has not answered for {self._probe:g} s") from error
        except httpx.HTTPError as error:
            if speaks_otherwise(error):
                why = reason_of(error)
                raise self.stranger(f"{self.url}: no {self.kind} server: {why}") from error
            raise self.lose(error) from error

    async def _metrics_text(self) -> str:
        """The text of ``/metrics``; empty if there is none."""
        response = await self._get("/metrics")
        return response.text if response.is_success else ""

    async def _post(self, path: str, body: Any, waits: Iterable[float] | None = None) -> Any:
        """Send a request; retry while the server is full, which means it has not begun it, after
        ``waits`` or the longer time that it states, within the time for an answer. Raises
        EngineDown if it stays full."""
        response, waited = await self._send(path, body), 0.0
        for wait in self.full_waits() if waits is None else waits:
            if response.status_code not in FULL or waited >= self._answer:
                break
            pause = min(max(wait, retry_after(response, wait)), self._answer - waited)
            await self.wait_full(pause)
            waited += pause
            response = await self._send(path, body)
        if response.status_code in FULL:
            raise EngineDown(f"{self.url} is full")
        self._refuse(response)
        return self._json(response)

    async def _send(self, path: str, body: Any) -> httpx.Response:
        try:
            try:
                return await self._client.post(path, json=body)
            except CUT_OFF:
                return await self._resend(path, body)
        except httpx.HTTPError as error:
            raise self.lose(error) from error

    async def _resend(self, path: str, body: Any) -> httpx.Response:
        """Send a request again whose connection ended before an answer."""
        return await self._client.post(path, json=body)

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request, once more if its connection ends without an answer: a server that was
        stuck closes idle connections before reading from them. A dead server refuses new ones."""
        try:
            return await self._client.request(method, path, **more)
        except CUT_OFF:
            return await self._client.request(method, path, **more)

    def _refuse(self, response: httpx.Response) -> None:
        """Raise ReplicaLost for a server error's status, EngineError for another error's."""
        if response.is_server_error:
            raise self.lose(f"status {response.status_code}")
        if response.is_error:
            raise EngineError(f"{self.url} refused a request: {refusal_message(response)}")

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError):
            raise self.lose(f"status {response.status_code}, no answer") from None


def check_url(name: str, url: str) -> None:
    """Raises ValueError, which begins with ``name``, for a URL that names no server."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{name}: {url!r}: {error}") from None
    if not parts.host or (parts.port or 0) > MOST_PORT:
        raise ValueError(f"{name}: {url!r}; a server is needed, such as http://127.0.0.1:30000")
