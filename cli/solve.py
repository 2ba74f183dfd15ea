"""``hedgerow solve``: grows one tree on its own engine, or on a server by its URL."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.live_tree import LiveTree
from search.engine import EngineError
from search.events import Event
from search.spec import RequestedSearch
from server.api_errors import ApiError, translate
from server.request_models import SearchRequest
from server.request_parsing import parse_search
from server.search_routes import run_search
from server.service import Service
from server.settings import API_KEY, PREFIX, Settings
from server.tree_log import TreeLog

Listen = Callable[[dict[str, Any]], None]
SearchClient = Callable[[SearchRequest, Listen], Awaitable[dict[str, Any]]]
"""Runs a search, passes on its events as dicts, returns the ``POST /v1/search`` document."""
CONNECT_SECONDS = 10.0
RETRY_SECONDS = 5


class ClientError(Exception):
    """The search could not be run; the message is for the person at the terminal."""


def local(service: Service) -> SearchClient:
    """A client that searches on the service's engine, in the same way as an HTTP request."""

    async def run(request: SearchRequest, listen: Listen) -> dict[str, Any]:
        def on_event(event: Event) -> None:
            listen(event.to_dict())

        try:
            document, _ = await run_search(await parse_search(request, service), service, on_event)
        except (ApiError, EngineError) as error:
            raise ClientError(str(translate(error, RETRY_SECONDS).detail)) from error
        return document

    return run


def remote(url: str) -> SearchClient:
    """A client that searches on the server at ``url``, such as ``http://127.0.0.1:8000``.

    It sends the API key in ``HEDGEROW_API_KEY``, if that is set.
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
    """Pass on the stream's events, then fetch the whole document. Raises ClientError."""
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


SHORT_DIGEST = 16
MOST_ANSWERS = 10
BAR = 12
"""The length of the heaviest answer's bar, in columns."""
OTHER_COLUMNS = 28
"""The columns that votes, weight and the table's lines take."""


@asynccontextmanager
async def search_client(
    settings: Settings, url: str | None, console: Console, trees: TreeLog | None = None
) -> AsyncIterator[SearchClient]:
    """Yield a client for the server at ``url``, or else for an engine started here."""
    if url is not None:
        yield remote(url)
        return
    from server.assemble import running
    from server.service import create_service

    async with AsyncExitStack() as stack:
        with console.status("loading the models"):
            model = await stack.enter_async_context(running(settings))
        yield local(create_service(settings, model.engine, model.text, trees))


async def solve(
    question: str,
    spec: RequestedSearch,
    settings: Settings,
    console: Console,
    trees: TreeLog,
    url: str | None,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Search, drawing the tree; print the reply and the votes; return the document.

    ``picture``: an SVG file to write the final tree to.
    """
    request = SearchRequest(question=question, search=spec)
    async with search_client(settings, url, console, trees if url is None else None) as client:
        with LiveTree(console, question) as drawing:
            document = await client(request, drawing.on_event)
    if url is not None:
        trees.write(document)
    if picture is not None:
        title = f"{document['policy']}, width {document['width']}, seed {document['seed']}"
        drawing.save_picture(picture, title)
    show(document, console)
    return document


def show(document: dict[str, Any], console: Console) -> None:
    """Print the reply, the votes and a line of statistics."""
    console.print()
    console.print(document["text"].strip(), markup=False, highlight=False)
    console.print()
    table = Table(title=f"vote: {document['vote']}")
    room = max(BAR, console.width - BAR - OTHER_COLUMNS)
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=room)
    for name in ("votes", "weight", ""):
        table.add_column(name, no_wrap=True)
    most = max((answer["weight"] for answer in document["answers"]), default=0.0)
    for answer in document["answers"][:MOST_ANSWERS]:
        bar = "█" * (round(BAR * answer["weight"] / most) if most else 0)
        weight = f"{answer['weight']:.4f}"
        table.add_row(Text(answer["answer"]), str(answer["count"]), weight, Text(bar, "green"))
    if document["answers"]:
        console.print(table)
    if len(document["answers"]) > MOST_ANSWERS:
        console.print(f"and {len(document['answers']) - MOST_ANSWERS} other answers")
    if document["unanswered"]:
        console.print(f"and {document['unanswered']} replies without an answer")
    stats = document["stats"]
    console.print(
        f"{document['policy']} {document['width']}, seed {document['seed']}: "
        f"{document['stop_reason']} after {stats['rounds']} rounds, {stats['nodes']} steps, "
        f"{stats['generated_tokens']} tokens, {stats['seconds']:.2f} s; "
        f"tree {document['tree_digest'][:SHORT_DIGEST]}",
        highlight=False,
        soft_wrap=True,
    )
