"""Searches by their ids: read, followed and deleted by the key that asked for them alone."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.errors import bad_value, no_events, search_unknown
from server.search_store import Kept
from server.service import Service
from server.stream import Events


def kept_routes(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()

    @router.get("/v1/search/{search_id}")
    async def read(search_id: str, request: Request) -> Response:
        kept = find(service, search_id, request)
        if kept.task is not None:
            return JSONResponse(running(search_id, kept.created))
        return Response(kept.document, media_type="application/json")

    @router.get("/v1/search/{search_id}/events")
    async def events(search_id: str, request: Request) -> Response:
        feed = find(service, search_id, request).feed
        if feed is None:
            raise no_events(search_id)
        return Events(feed.read(last_event(request), service.settings.keepalive_seconds))

    @router.delete("/v1/search/{search_id}")
    async def delete(search_id: str, request: Request) -> Response:
        find(service, search_id, request)
        service.store.remove(search_id)
        return JSONResponse({"id": search_id, "object": "search.deleted", "deleted": True})

    return router


def find(service: Service, search_id: str, request: Request) -> Kept:
    """A search of the request's own key. Raises ApiError (404) for any other."""
    kept = service.store.get(search_id, request.state.key.name)
    if kept is None:
        raise search_unknown(search_id)
    return kept


def running(search_id: str, created: int) -> dict[str, Any]:
    """What is said of a search that is not done."""
    return {"id": search_id, "object": "search", "created": created, "status": "running"}


def last_event(request: Request) -> int:
    """The number after which events are wanted; -1 for all. Raises ApiError."""
    sent = request.headers.get("last-event-id", "").strip()
    if not sent:
        return -1
    if not (sent.isascii() and sent.isdecimal() and len(sent) <= len(str(2**63))):
        raise bad_value("Last-Event-ID", f"must be the id of an event, got {sent[:40]!r}")
    return int(sent)
