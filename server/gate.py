"""Between the edge and the routes, pure ASGI: whose request it is, and whether it may come in.

Nothing of a request's body has been read when it is turned away here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission
from server.errors import ApiError, shutting_down
from server.keys import Keyring, must_hold
from server.ledger import Ledger
from server.settings import Settings

OPEN = frozenset({"/", "/health", "/ready"})
PLAYGROUND = "/playground/"
"""What lies below is open as well: the page has a field for the key."""
GROWING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/search"})
"""POST to these wants an engine; so does POST to ``/v1/search/ID/branch``."""


class Gate:
    """Wraps the app; puts ``key`` and, where a tree may grow, ``ticket`` into the request's state.

    The ticket is given back when the response is over, unless a background search kept it.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: Keyring,
        admission: Admission,
        ledger: Ledger,
        draining: asyncio.Event,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._admission = admission
        self._ledger = ledger
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            self._let_in(scope, state)
        except ApiError as refused:
            self._ledger.refused(refused.code)
            answer = JSONResponse(refused.body(), refused.status_code, refused.headers)
            await answer(scope, receive, send)
            return
        ticket = state.get("ticket")
        try:
            await self._app(scope, receive, send)
        finally:
            if ticket is not None and not state.get("kept"):
                ticket.close()

    def _let_in(self, scope: Scope, state: dict[str, Any]) -> None:
        """Raises ApiError for a request that may not come in."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if path in OPEN or path.startswith(PLAYGROUND):
            return
        if path == "/metrics":
            must_hold(_secret(self._settings.metrics_key), sent)
            return
        if path.startswith("/admin/"):
            if self._settings.admin_key is None:
                raise ApiError(404, "not_found", "there is no such route")
            must_hold(_secret(self._settings.admin_key), sent)
            return
        state["key"] = self._keys.find(sent)
        branch = path.startswith("/v1/search/") and path.endswith("/branch")
        if scope["method"] == "POST" and (path in GROWING or branch):
            if self._draining.is_set():
                raise shutting_down(self._settings.retry_after_seconds)
            self._ledger.must_have_left(state["key"])
            state["ticket"] = self._admission.take(state["key"])


def _secret(setting: SecretStr | None) -> str | None:
    return None if setting is None else setting.get_secret_value()
