"""``POST /v1/search`` and its branches: whole trees and their events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.events import Event
from search.spec import SearchSpec
from server.admission import Ticket, seconds_after_turn
from server.ask import Ask, ask_branch, ask_search
from server.background import in_background
from server.disconnect import forget_body, run_for
from server.errors import (
    StreamAborted,
    nothing_finished,
    search_running,
    translate,
)
from server.estimate import estimate
from server.feed import HEARTBEAT, Feed
from server.kept_routes import find, running
from server.reply import search_document
from server.service import Service
from server.stream import Events, Result, Silence, event, follow
from server.wire import BranchRequest, SearchRequest

PUBLIC_NAMES = {"answered": "answer"}


def search_routes(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()

    @router.post("/v1/search")
    async def start(body: SearchRequest, request: Request) -> Response:
        own = service.serving(body.model)
        ask, spec = await ask_search(body, own, request.state.key)
        if body.dry_run:
            return JSONResponse(estimate(ask, own))
        return await answer(ask, spec, body, request)

    @router.post("/v1/search/{search_id}/branch")
    async def branch(search_id: str, body: BranchRequest, request: Request) -> Response:
        kept = find(service, search_id, request)
        if kept.task is not None:
            raise search_running(search_id)
        ask, spec = await ask_branch(body, kept.document, service, request.state.key)
        return await answer(ask, spec, body, request)

    async def answer(
        ask: Ask, spec: SearchSpec, body: SearchRequest | BranchRequest, request: Request
    ) -> Response:
        forget_body(request)
        ticket, own = request.state.ticket, service.serving(ask.model)
        if body.background:
            feed = Feed()
            work = grow(ask, spec, own, partial(_record, feed, ask), ticket, feed)
            in_background(work, ask, own, ticket, feed)
            if body.stream:
                return Events(feed.read(-1, service.settings.keepalive_seconds))
            return JSONResponse(running(ask.id, ask.created), 202)
        if body.stream:
            return Events(_events(ask, spec, own, ticket))
        work = grow(ask, spec, own, lambda _: None, ticket)
        return JSONResponse(await run_for(ticket, own.forest, work))

    return router


async def grow(
    ask: Ask,
    spec: SearchSpec,
    service: Service,
    tell: Callable[[Event], None],
    ticket: Ticket | None = None,
    feed: Feed | None = None,
) -> dict[str, Any]:
    """Search when it is its turn, and keep the document under the search's id."""
    service.store.begin(ask.id, ask.key.name, ask.created, ticket or asyncio.current_task(), feed)
    try:
        seconds = await seconds_after_turn(ticket, ask.seconds)
        prompt = len(ask.problem.prompt)
        with service.ledger.booking(ask.key, prompt, searched=True) as spent:

            def hear(event: Event) -> None:
                spent.hear(event)
                tell(event)

            outcome = await service.forest.search(
                ask.tree,
                ask.problem,
                spec,
                seconds=seconds,
                listen=hear,
                begun=ask.begun,
                in_thought=bool(ask.in_thought),
            )
        if outcome.chosen is None:
            raise nothing_finished(outcome.stop_reason.value, spec.policy)
        document = search_document(ask, outcome, service.fingerprint)
        kept = json.dumps(document).encode()
    except BaseException:
        if feed is None:
            service.store.remove(ask.id)
        raise
    if feed is not None:
        feed.add("done", _without_tree(document), last=True)
    service.store.finish(ask.id, kept)
    service.experience.note(outcome)
    await service.log_tree(document)
    return document


async def _events(
    ask: Ask, spec: SearchSpec, service: Service, ticket: Ticket
) -> AsyncGenerator[bytes, None]:
    """Tree events numbered from 0, then ``done`` with everything but the tree, or ``error``."""
    settings = service.settings
    number = 0
    try:
        work = partial(grow, ask, spec, service, ticket=ticket)
        async for item in follow(ticket, service.forest, work, settings.keepalive_seconds):
            if isinstance(item, Silence):
                yield HEARTBEAT
                continue
            name, data = _told(item, ask)
            yield event(data, name, number)
            number += 1
    except Exception as error:  # the HTTP boundary: told to the client, then cut
        said = translate(error, settings.retry_after_seconds)
        yield event(said.body(), "error", number)
        raise StreamAborted from error


def _record(feed: Feed, ask: Ask, item: Event) -> None:
    feed.add(*_told(item, ask))


def _told(item: Event | Result[dict[str, Any]], ask: Ask) -> tuple[str, dict[str, Any]]:
    """An event's public name and data."""
    if isinstance(item, Result):
        return "done", _without_tree(item.value)
    name = PUBLIC_NAMES.get(item.name, item.name)
    return name, item.to_dict() | {"event": name, "id": ask.id}


def _without_tree(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "tree"}
