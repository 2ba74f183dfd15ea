"""Routes for operators, and for clients to look up models: models, usage, health, metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from search.counters import Usage
from search.engine import EngineDown, EngineError
from server.api_errors import shutting_down
from server.requested_search import model_names, resolve_model
from server.reward_settings import judges
from server.service import Service
from server.settings import Settings

OWNER = "hedgerow"
EPOCH = 1_767_225_600
"""``created`` of all models: some clients need it, and it must not change between starts."""


def ops_routes(service: Service) -> APIRouter:
    """Create the routes of a service."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        listed = [_model(name, each.settings) for each in service.models for name in _names(each)]
        return JSONResponse({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        settings = service.serving(name).settings
        resolve_model(name, settings)
        return JSONResponse(_model(name, settings))

    @router.get("/v1/usage")
    async def own_usage(request: Request) -> Response:
        return JSONResponse(service.quotas.account(request.state.key.name))

    @router.get("/admin/usage")
    async def all_usage() -> Response:
        return JSONResponse({"data": service.quotas.all()})

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        if service.draining.is_set():
            raise shutting_down(service.settings.retry_after_seconds)
        try:
            async with asyncio.timeout(service.settings.ready_seconds):
                for each in service.models:
                    await each.runner.engine.health()
        except TimeoutError:
            raise EngineDown("the engine does not answer") from None
        return JSONResponse({"status": "ready"})

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        reports = await asyncio.gather(*(_usage_of(each) for each in service.models))
        for each, usage in zip(service.models, reports, strict=True):
            service.metrics.engines.note_usage(each.settings.model, usage)
        service.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _names(service: Service) -> list[str]:
    outcome = service.runner.engine.capabilities.outcome
    return model_names(service.settings, outcome=outcome)


async def _usage_of(service: Service) -> Usage | None:
    """A model's engine's usage; None if the engine does not answer within ``ready_seconds``."""
    try:
        async with asyncio.timeout(service.settings.ready_seconds):
            return await service.runner.engine.usage()
    except (EngineError, TimeoutError):
        return None


def _model(name: str, settings: Settings) -> dict[str, object]:
    """OpenAI's description and what judges steps, without the operator's paths and URLs."""
    return {
        "id": name,
        "object": "model",
        "created": EPOCH,
        "owned_by": OWNER,
        **judges(settings),
    }
