"""Between the edge and the routes, pure ASGI: whose request it is, and whether it may come in.

Most are turned away before their body is read; a place is taken once it is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission, QueueSlot
from server.api_errors import ApiError, shutting_down
from server.api_keys import ApiKey, ApiKeys, must_hold
from server.body_limits import BodyLimits
from server.client_disconnect import while_connected
from server.quotas import Quotas
from server.settings import Settings

OPEN = frozenset({"/", "/health", "/ready"})
PLAYGROUND = "/playground/"
"""What lies below is open as well: the page has a field for the key."""
GROWING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/search"})
"""POST to these wants an engine; so does POST to ``/v1/search/ID/branch``."""


class AuthMiddleware:
    """Wraps the app; puts ``key`` and, where a tree may grow, ``slot`` into the request's state.

    What is done for a request with a key ends when its client leaves, whatever it is by then.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: ApiKeys,
        admission: Admission,
        bodies: BodyLimits,
        quotas: Quotas,
        draining: asyncio.Event,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._admission = admission
        self._bodies = bodies
        self._quotas = quotas
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            grows = self._let_in(scope, state)
            body = await self._bodies.whole(scope, receive) if "key" in state else None
            slot = self._slot(state, len(body or b"")) if grows else None
        except ApiError as refused:
            self._quotas.refused(refused.code)
            answer = JSONResponse(refused.body(), refused.status_code, refused.headers)
            await answer(scope, receive, send)
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        try:
            unread, body = [body], None  # nobody holds a body that has been read
            await while_connected(self._app, scope, unread, receive, send)
        finally:
            if slot is not None:
                slot.close()

    def _let_in(self, scope: Scope, state: dict[str, Any]) -> bool:
        """Whether a tree may grow for it. Raises ApiError for a request that may not come in."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if path in OPEN or path.startswith(PLAYGROUND):
            return False
        if path == "/metrics":
            must_hold(_secret(self._settings.metrics_key), sent)
            return False
        if path.startswith("/admin/"):
            if self._settings.admin_key is None:
                raise ApiError(404, "not_found", "there is no such route")
            must_hold(_secret(self._settings.admin_key), sent)
            return False
        state["key"] = self._keys.find(sent)
        branch = path.startswith("/v1/search/") and path.endswith("/branch")
        grows = scope["method"] == "POST" and (path in GROWING or branch)
        if grows:
            self._must_be_able(state["key"])
        return grows

    def _slot(self, state: dict[str, Any], size: int) -> QueueSlot:
        """A place, now that the body is whole; while it came, much may have changed."""
        self._must_be_able(state["key"])
        state["slot"] = self._admission.take(state["key"], size)
        return state["slot"]

    def _must_be_able(self, key: ApiKey) -> None:
        if self._draining.is_set():
            raise shutting_down(self._settings.retry_after_seconds)
        self._quotas.must_have_left(key)


def _secret(setting: SecretStr | None) -> str | None:
    return None if setting is None else setting.get_secret_value()
