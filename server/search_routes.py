"""``/v1/search``: whole trees, their events, and searches by id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.events import Event
from search.spec import SearchSpec
from server.admission import Ticket, seconds_after_turn
from server.ask import Ask, ask_search
from server.disconnect import run_for
from server.errors import StreamAborted, nothing_finished, search_unknown, translate
from server.reply import search_document
from server.service import Service
from server.stream import Result, Silence, event, follow, streaming
from server.wire import SearchRequest

PUBLIC_NAMES = {"answered": "answer"}


def search_routes(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()

    @router.post("/v1/search")
    async def start(body: SearchRequest, request: Request) -> Response:
        ask, spec = await ask_search(body, service, request.state.key)
        ticket = request.state.ticket
        if body.stream:
            return streaming(_events(ask, spec, service, ticket))
        work = grow(ask, spec, service, lambda _: None, ticket)
        document = await run_for(request, service.forest, work)
        return JSONResponse(document)

    @router.get("/v1/search/{search_id}")
    async def read(search_id: str, request: Request) -> Response:
        kept = service.store.get(search_id, request.state.key.name)
        if kept is None:
            raise search_unknown(search_id)
        if kept.task is not None:
            head = {"id": search_id, "object": "search", "created": kept.created}
            return JSONResponse(head | {"status": "running"})
        return Response(kept.document, media_type="application/json")

    @router.delete("/v1/search/{search_id}")
    async def delete(search_id: str, request: Request) -> Response:
        if service.store.get(search_id, request.state.key.name) is None:
            raise search_unknown(search_id)
        service.store.remove(search_id)
        return JSONResponse({"id": search_id, "object": "search.deleted", "deleted": True})

    return router


async def grow(
    ask: Ask,
    spec: SearchSpec,
    service: Service,
    tell: Callable[[Event], None],
    ticket: Ticket | None = None,
) -> dict[str, Any]:
    """Search when it is its turn, and keep the document under the search's id."""
    service.store.begin(ask.id, ask.key.name, ask.created, asyncio.current_task())
    try:
        seconds = await seconds_after_turn(ticket, ask.seconds)
        outcome = await service.forest.search(
            ask.tree, ask.problem, spec, seconds=seconds, listen=tell
        )
        if outcome.chosen is None:
            raise nothing_finished(outcome.stop_reason.value, spec.policy)
    except BaseException:
        service.store.remove(ask.id)
        raise
    document = search_document(ask, outcome, service.fingerprint)
    service.ledger.used(ask.key, document["usage"], searched=True)
    service.trees.write(document)
    service.store.finish(ask.id, json.dumps(document).encode())
    return document


async def _events(
    ask: Ask, spec: SearchSpec, service: Service, ticket: Ticket
) -> AsyncIterator[bytes]:
    """Tree events numbered from 0, then ``done`` with everything but the tree, or ``error``."""
    settings = service.settings
    number = 0
    try:
        work = partial(grow, ask, spec, service, ticket=ticket)
        async for item in follow(service.forest, work, settings.keepalive_seconds):
            if isinstance(item, Silence):
                yield b": still searching\n\n"
                continue
            name, data = _told(item, ask)
            yield event(data, name, number)
            number += 1
    except Exception as error:  # the HTTP boundary: told to the client, then cut
        said = translate(error, settings.retry_after_seconds)
        yield event(said.body(), "error", number)
        raise StreamAborted from error


def _told(item: Event | Result[dict[str, Any]], ask: Ask) -> tuple[str, dict[str, Any]]:
    """An event's public name and data."""
    if isinstance(item, Result):
        return "done", {key: value for key, value in item.value.items() if key != "tree"}
    name = PUBLIC_NAMES.get(item.name, item.name)
    return name, item.to_dict() | {"event": name, "id": ask.id}
