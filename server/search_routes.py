"""``/v1/search``: whole trees, their events, continuations, and kept searches by id."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.events import Event
from server.admission import QueueSlot
from server.api_errors import (
    NO_RETRY,
    ApiError,
    StreamAborted,
    bad_value,
    echo,
    nothing_finished,
    translate,
)
from server.chat_routes import search_in_turn
from server.kept_searches import HEARTBEAT, EventLog, KeptSearch
from server.limits import most_tokens
from server.middleware import forget_body
from server.replies import search_document
from server.request_models import BranchRequest, SearchRequest
from server.request_parsing import ParsedRequest, parse_branch, parse_search
from server.search_runner import Silence, WorkDone
from server.service import Service
from server.streams import OR_EVENTS, EventStream, event

log = logging.getLogger("hedgerow.background")

PUBLIC_NAMES = {"answered": "answer"}
OR_LATER = OR_EVENTS | {202: {"description": "The search runs in the background."}}


def search_routes(service: Service) -> APIRouter:
    """Create the routes of a service."""
    router = APIRouter()

    @router.post("/v1/search", responses=OR_LATER)
    async def start(body: SearchRequest, request: Request) -> Response:
        target = service.serving(body.model)
        parsed = await parse_search(body, target, request.state.key)
        if body.dry_run:
            return JSONResponse(estimate(parsed, target))
        return await _answer(parsed, target, body, request)

    @router.post("/v1/search/{search_id}/branch", responses=OR_LATER)
    async def branch(search_id: str, body: BranchRequest, request: Request) -> Response:
        search = find(service, search_id, request)
        if search.task is not None:
            message = f"id: the search {echo(search_id)} is not done; wait for it"
            raise ApiError(409, "search_running", message, param="id", headers=NO_RETRY)
        parsed = await parse_branch(body, search.document, service, request.state.key)
        return await _answer(parsed, service.serving(parsed.model), body, request)

    @router.get("/v1/search/{search_id}")
    async def read(search_id: str, request: Request) -> Response:
        search = find(service, search_id, request)
        if search.task is not None:
            return JSONResponse(status_document(search_id, search.created))
        return Response(search.document, media_type="application/json")

    @router.get("/v1/search/{search_id}/events", response_class=Response, responses=OR_EVENTS)
    async def events(search_id: str, request: Request) -> Response:
        event_log = find(service, search_id, request).event_log
        if event_log is None:
            why = "only 'background' searches have them"
            message = f"id: no events are kept of {echo(search_id)}; {why}"
            raise ApiError(404, "events_not_kept", message, param="id")
        return EventStream(event_log.read(last_event(request), service.settings.keepalive_seconds))

    @router.delete("/v1/search/{search_id}")
    async def delete(search_id: str, request: Request) -> Response:
        find(service, search_id, request)
        service.store.remove(search_id)
        return JSONResponse({"id": search_id, "object": "search.deleted", "deleted": True})

    return router


async def _answer(
    parsed: ParsedRequest,
    service: Service,
    body: SearchRequest | BranchRequest,
    request: Request,
) -> Response:
    forget_body(request)
    slot, quiet = request.state.slot, service.settings.keepalive_seconds
    if body.background:
        event_log = EventLog()
        work = run_search(
            parsed, service, lambda item: event_log.add(*_event_of(item, parsed)), slot, event_log
        )
        in_background(work, parsed, service, slot, event_log)
        if body.stream:
            return EventStream(event_log.read(-1, quiet))
        return JSONResponse(status_document(parsed.id, parsed.created), 202)
    if body.stream:
        return EventStream(_events(parsed, service, slot))
    work = run_search(parsed, service, lambda _: None, slot)
    _, document = await service.runner.run(work, slot)
    return Response(document, media_type="application/json")


async def run_search(
    parsed: ParsedRequest,
    service: Service,
    tell: Callable[[Event], None],
    slot: QueueSlot | None = None,
    event_log: EventLog | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Search when it is the request's turn; return the document, and its JSON that is kept."""
    service.store.begin(
        parsed.id, parsed.key.name, parsed.created, slot or asyncio.current_task(), event_log
    )
    try:
        outcome = await search_in_turn(parsed, service, slot, tell)
        if outcome.chosen is None:
            raise nothing_finished(outcome.stop_reason.value, outcome.spec.policy)
        document = search_document(parsed, outcome, service.fingerprint)
        body = json.dumps(document).encode()
    except BaseException:
        if event_log is None:
            service.store.remove(parsed.id)
        raise
    if event_log is not None:
        event_log.add("done", _without_tree(document), last=True)
    service.store.finish(parsed.id, body)
    service.typical_cost.note(outcome)
    await service.log_tree(document)
    return document, body


async def _events(
    parsed: ParsedRequest, service: Service, slot: QueueSlot
) -> AsyncGenerator[bytes, None]:
    """The stream: events numbered from 0, then ``done`` with all but the tree, or ``error``."""
    settings = service.settings
    number = 0
    try:
        work = partial(run_search, parsed, service, slot=slot)
        async for item in service.runner.follow(work, slot, settings.keepalive_seconds):
            if isinstance(item, Silence):
                yield HEARTBEAT
                continue
            name, data = _event_of(item, parsed)
            yield event(data, name, number)
            number += 1
    except Exception as error:  # the HTTP boundary: send the error, then cut the stream
        reply = translate(error, settings.retry_after_seconds)
        yield event(reply.body(), "error", number)
        raise StreamAborted from error


def _event_of(
    item: Event | WorkDone[tuple[dict[str, Any], bytes]], parsed: ParsedRequest
) -> tuple[str, dict[str, Any]]:
    """An event's public name and data."""
    if isinstance(item, WorkDone):
        return "done", _without_tree(item.value[0])
    name = PUBLIC_NAMES.get(item.name, item.name)
    return name, item.to_dict() | {"event": name, "id": parsed.id}


def _without_tree(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "tree"}


def find(service: Service, search_id: str, request: Request) -> KeptSearch:
    """A kept search of the request's own key. Raises ApiError (404) for any other id."""
    search = service.store.get(search_id, request.state.key.name)
    if search is None:
        message = f"id: there is no search {echo(search_id)}, or it is no longer kept"
        raise ApiError(404, "search_not_found", message, param="id")
    return search


def status_document(search_id: str, created: int, status: str = "running") -> dict[str, Any]:
    """The response for a search that has no document (yet)."""
    return {"id": search_id, "object": "search", "created": created, "status": status}


def last_event(request: Request) -> int:
    """The number in the ``Last-Event-ID`` header, -1 without one. Raises ApiError."""
    header = request.headers.get("last-event-id", "").strip()
    if not header:
        return -1
    if not (header.isascii() and header.isdecimal() and len(header) <= len(str(2**63))):
        raise bad_value("Last-Event-ID", f"must be the id of an event, got {header[:40]!r}")
    return int(header)


def in_background(
    work: Coroutine[Any, Any, Any],
    parsed: ParsedRequest,
    service: Service,
    slot: QueueSlot,
    event_log: EventLog,
) -> None:
    """Run ``work`` to its end; an error is kept under its id and sent to the events' readers."""
    task = service.runner.start(work, slot, outlives_request=True)
    service.store.begin(parsed.id, parsed.key.name, parsed.created, slot, event_log)

    def end(task: asyncio.Task[Any]) -> None:
        error = service.runner.cancelled() if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        reply = translate(error, service.settings.retry_after_seconds)
        if reply.code == "internal_error":
            log.error("a background search failed", exc_info=error)
        event_log.add("error", reply.body(), last=True)
        document = status_document(parsed.id, parsed.created, "failed")
        service.store.finish(parsed.id, json.dumps(document | reply.body()).encode())

    task.add_done_callback(end)


def estimate(parsed: ParsedRequest, service: Service) -> dict[str, Any]:
    """The most that a search can cost by its spec, and the mean cost of its kind so far."""
    spec = parsed.spec
    assert spec is not None, "a plain reply is not estimated"
    prompt = len(parsed.problem.prompt)
    most = most_tokens(spec)
    return {
        "object": "search.estimate",
        "model": parsed.model,
        "spec": spec.model_dump(),
        "prompt_tokens": prompt,
        "most": {"completion_tokens": most, "kv_tokens": prompt + most, "seconds": parsed.seconds},
        "typical": service.typical_cost.typical(spec.policy, spec.width),
    }
