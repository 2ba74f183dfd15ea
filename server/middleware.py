"""Pure ASGI middleware: request ids and access log, authentication, quotas and admission.

Most refusals come before the body is read; a place is taken once the body is complete. When a
client disconnects, the work for its request is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import QueueSlot
from server.api_errors import (
    ApiError,
    ClientLeft,
    StreamAborted,
    internal_error,
    request_id,
    shutting_down,
    unforeseen,
)
from server.api_keys import ApiKey, must_hold
from server.connections import BodyLimits
from server.service import Service

log = logging.getLogger("hedgerow.access")

GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
BAD = 400
CLIENT_GONE = 499
"""The status that is logged and counted, but never sent, when a client leaves early."""


class RequestMiddleware:
    """Gives requests their ids and logs them. A short, printable ``x-request-id`` is echoed."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._settings = service.settings
        self._metrics = service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        name = client_id if GOOD_ID.fullmatch(client_id) else uuid.uuid4().hex
        request_id.set(name)
        scope["root_path"] = self._settings.root_path  # whether or not a proxy has stripped it
        start = time.monotonic()
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                if status >= BAD and time.monotonic() - start > self._settings.retry_seconds:
                    headers["x-should-retry"] = "false"
            await send(message)

        with self._metrics.requests_in_flight.track_inprogress():
            try:
                await self._app(scope, receive, send_with_id)
            except ClientLeft:
                self._metrics.disconnects.inc()
            except StreamAborted as aborted:
                _log_failure(aborted.__cause__)
            except Exception:  # the HTTP boundary: its text is only logged
                log.exception("failed")
                if status == CLIENT_GONE:
                    internal = internal_error()
                    answer = JSONResponse(internal.body(), internal.status_code)
                    await answer(scope, receive, send_with_id)
            finally:
                seconds = time.monotonic() - start
                route = getattr(scope.get("route"), "path", None) or "other"  # paths are unbounded
                self._metrics.request_seconds.labels(route, status).observe(seconds)
                fields = {"route": route, "status": status, "seconds": round(seconds, 3)}
                key = scope.get("state", {}).get("key")
                fields |= {} if key is None else {"key": key.name}
                line = " ".join(f"{k}={v}" for k, v in fields.items())
                log.info("answered %s", line, extra={"fields": fields})


def _log_failure(error: BaseException | None) -> None:
    """Log why a stream was cut: a fault of the server with its traceback, others in a line."""
    if isinstance(error, Exception) and not unforeseen(error):
        log.warning("the stream failed: %s", error)
    else:
        log.error("the stream failed", exc_info=error)


OPEN = frozenset({"/", "/health", "/ready"})
PLAYGROUND = "/playground/"
"""Paths below this need no key: the page has a field for it."""
SEARCH_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *("/v1/search", "/v1/score", "/score"),
    }
)
"""POST to these needs an engine, as does POST to ``/v1/search/ID/branch``."""


class AuthMiddleware:
    """Puts ``key`` and, if a tree may grow for it, ``slot`` into the request's state.

    The work for a request with a key is cancelled when its client disconnects.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._bodies = BodyLimits(service.settings)
        service.metrics.arriving.set_function(lambda: len(self._bodies))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            searches = self._let_in(scope, state)
            body = await self._bodies.whole(scope, receive) if "key" in state else None
            slot = self._slot(state, len(body or b"")) if searches else None
        except ApiError as refusal:
            self._service.metrics.refusals.labels(refusal.code).inc()
            answer = JSONResponse(refusal.body(), refusal.status_code, refusal.headers)
            await answer(scope, receive, send)
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        try:
            unread, body = [body], None  # so that the body is freed once it is read
            await while_connected(self._app, scope, unread, receive, send)
        finally:
            if slot is not None:
                slot.close()

    def _let_in(self, scope: Scope, state: dict[str, Any]) -> bool:
        """Whether a tree may grow for the request. Raises ApiError if the request is refused."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        authorization = [value for name, value in scope["headers"] if name == b"authorization"]
        if path in OPEN or path.startswith(PLAYGROUND):
            return False
        if path == "/metrics":
            must_hold(self._service.settings.metrics_key, authorization)
            return False
        if path.startswith("/admin/"):
            if self._service.settings.admin_key is None:
                raise ApiError(404, "not_found", "there is no such route")
            must_hold(self._service.settings.admin_key, authorization)
            return False
        keys = self._service.keys
        state["key"] = keys.find(authorization) if keys.required else keys.anybody
        branch = path.startswith("/v1/search/") and path.endswith("/branch")
        searches = scope["method"] == "POST" and (path in SEARCH_PATHS or branch)
        if searches:
            self._must_be_able(state["key"])
        return searches

    def _slot(self, state: dict[str, Any], size: int) -> QueueSlot:
        """Take a place once the body is complete; check again what may have changed meanwhile."""
        self._must_be_able(state["key"])
        state["slot"] = self._service.admission.take(state["key"], size)
        return state["slot"]

    def _must_be_able(self, key: ApiKey) -> None:
        if self._service.draining.is_set():
            raise shutting_down(self._service.settings.retry_after_seconds)
        self._service.quotas.must_have_left(key)


async def while_connected(
    app: ASGIApp, scope: Scope, unread: list[bytes], receive: Receive, send: Send
) -> None:
    """Have ``app`` answer a request whose body is complete; cancel that if the client leaves.

    ``unread``: a list with the body, which is removed when the app reads it.

    Raises ClientLeft if the client left before the answer; otherwise what the app raises.
    """
    complete = False
    disconnect = asyncio.create_task(_until_client_leaves(receive))

    async def receive_rest() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.wait({disconnect})
        return {"type": "http.disconnect"}

    async def send_noted(message: Message) -> None:
        nonlocal complete
        await send(message)
        complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    task = asyncio.ensure_future(app(scope, receive_rest, send_noted))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        too_soon = not (task.done() or complete)  # servers send a disconnect after an answer too
        if not too_soon:
            await _wait_for(task)
    finally:
        disconnect.cancel()
        task.cancel()
        await _wait_for(task)
    if not task.cancelled():
        task.result()
    if too_soon:
        raise ClientLeft


async def _wait_for(task: asyncio.Future[None]) -> None:
    if not task.done():
        await asyncio.wait({task})


def forget_body(request: Request) -> None:
    """Free the body's bytes, once it is parsed, before the request waits for its turn."""
    request._body = b""


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
