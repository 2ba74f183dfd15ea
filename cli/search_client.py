"""Growing one tree for the command line: on an engine of its own, or on a server by its URL."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse

from search.engine import EngineError
from search.events import Event
from server.api_errors import ApiError, translate
from server.request_models import SearchRequest
from server.request_parsing import parse_search
from server.search_routes import grow
from server.service import Service
from server.settings import API_KEY, PREFIX

Listen = Callable[[dict[str, Any]], None]
SearchClient = Callable[[SearchRequest, Listen], Awaitable[dict[str, Any]]]
"""Runs a search, tells its events as dicts, and returns the document of ``POST /v1/search``."""

CONNECT_SECONDS = 10.0
RETRY_SECONDS = 5


class ClientError(Exception):
    """The search could not be run; the message is for the person at the terminal."""


def local(service: Service) -> SearchClient:
    """Searches on the service's own engine, by the same way as a request over HTTP."""

    async def run(request: SearchRequest, listen: Listen) -> dict[str, Any]:
        def hear(event: Event) -> None:
            listen(event.to_dict())

        try:
            return await grow(await parse_search(request, service), service, hear)
        except (ApiError, EngineError) as error:
            raise ClientError(str(translate(error, RETRY_SECONDS).detail)) from error

    return run


def remote(url: str) -> SearchClient:
    """Searches on the server at ``url``, such as ``http://127.0.0.1:8000``.

    A server that wants an API key gets the one in ``HEDGEROW_API_KEY``.
    """
    key = os.environ.get(f"{PREFIX}{API_KEY.upper()}")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def run(request: SearchRequest, listen: Listen) -> dict[str, Any]:
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": True}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            async with httpx.AsyncClient(
                base_url=url.rstrip("/"), timeout=timeout, headers=headers
            ) as client:
                return await _follow(client, body, listen)
        except (httpx.HTTPError, httpx.InvalidURL, SSEError, json.JSONDecodeError) as error:
            raise ClientError(f"{url}: {error or type(error).__name__}") from error

    return run


async def _follow(
    client: httpx.AsyncClient, body: dict[str, Any], listen: Listen
) -> dict[str, Any]:
    """Tell the stream's events, then fetch the whole document."""
    name, last = "", None
    async with aconnect_sse(client, "POST", "/v1/search", json=body) as stream:
        if stream.response.status_code != httpx.codes.OK:
            raise ClientError(_message(await stream.response.aread()))
        async for event in stream.aiter_sse():
            name = event.event
            if name == "error":
                raise ClientError(_message(event.data.encode()))
            last = event.json()
            if name != "done":
                listen(last)
    if name != "done" or last is None:
        raise ClientError("the stream ended before the search did")
    return (await client.get(f"/v1/search/{last['id']}")).raise_for_status().json()


def _message(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])
