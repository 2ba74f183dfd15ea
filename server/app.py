"""The ASGI app: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from server import api_errors
from server.chat_routes import chat_routes
from server.middleware import AuthMiddleware, RequestMiddleware
from server.operator_routes import ops_routes
from server.playground_routes import page_routes
from server.responses_routes import responses_routes
from server.score_routes import score_routes
from server.search_routes import search_routes
from server.service import Service, own_version


def create_app(service: Service, at_end: Callable[[], Awaitable[None]] | None = None) -> FastAPI:
    """Create the app; at shutdown it cancels running searches, then awaits ``at_end``."""
    settings = service.settings
    app = FastAPI(
        title="Hedgerow",
        version=own_version(),
        description="An OpenAI-compatible server for test-time search",
        lifespan=lambda _: service.lifetime(at_end),
        redirect_slashes=False,
        responses={"default": {"model": api_errors.ErrorBody, "description": "Error"}},
    )
    api_errors.install(app, settings.retry_after_seconds)
    app.add_middleware(AuthMiddleware, service=service)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "last-event-id", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestMiddleware, service=service)
    if service.traces is not None:
        app.add_middleware(service.traces.requests)
    for routes in (chat_routes, responses_routes, search_routes, score_routes):
        app.include_router(routes(service))
    for routes in (ops_routes, page_routes):
        app.include_router(routes(service))
    app.state.service = service
    return app
