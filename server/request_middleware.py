"""The outermost layer, pure ASGI: request ids, timing, and streams cut short."""

from __future__ import annotations

import logging
import re
import time
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_errors import ClientLeft, StreamAborted, internal_error
from server.logs import request_id
from server.prometheus_metrics import Metrics

log = logging.getLogger("hedgerow.access")

GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
BAD = 400
LEFT = 499
"""What is logged and counted, and seen by nobody, when a client leaves before its answer."""


class RequestMiddleware:
    """Wraps the app. A client's ``x-request-id`` is echoed if it is short and printable."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        retry_seconds: float,
        root_path: str,
    ) -> None:
        """An error that comes after ``retry_seconds`` is not to be retried by the client itself;
        ``root_path`` is where a proxy shows this server, stripped or not."""
        self._app = app
        self._metrics = metrics
        self._retry_seconds = retry_seconds
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(name)
        scope["root_path"] = self._root_path
        began = time.monotonic()
        status = LEFT

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                if status >= BAD and time.monotonic() - began > self._retry_seconds:
                    headers["x-should-retry"] = "false"
            await send(message)

        with self._metrics.requests_in_flight.track_inprogress():
            try:
                await self._app(scope, receive, send_named)
            except ClientLeft:
                self._metrics.disconnects.inc()
            except StreamAborted as aborted:
                log.error("the stream failed", exc_info=aborted.__cause__)
            except Exception:  # the HTTP boundary: logged here, its text goes no further
                log.exception("failed")
                if status == LEFT:
                    failed = internal_error()
                    answer = JSONResponse(failed.body(), failed.status_code)
                    await answer(scope, receive, send_named)
            finally:
                seconds = time.monotonic() - began
                self._metrics.request_seconds.labels(_route(scope), status).observe(seconds)
                fields = {"route": _route(scope), "status": status, "seconds": round(seconds, 3)}
                key = scope.get("state", {}).get("key")
                fields |= {} if key is None else {"key": key.name}
                said = " ".join(f"{k}={v}" for k, v in fields.items())
                log.info("answered %s", said, extra={"fields": fields})


def _route(scope: Scope) -> str:
    """The route's template: a closed set, unlike paths."""
    route = scope.get("route")
    return getattr(route, "path", None) or "other"
