"""The ASGI app: routes, errors and the edge around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from search.controller import search
from search.engine import Engine
from server import api_errors
from server.admission import Admission
from server.api_keys import ApiKeys
from server.auth_middleware import AuthMiddleware
from server.body_limits import BodyLimits
from server.chat_routes import chat_routes
from server.kept_searches import SearchStore
from server.limits import TypicalCost
from server.openapi import describe
from server.operator_routes import ops_routes
from server.plain_completion import complete
from server.playground_routes import page_routes
from server.prometheus_metrics import Metrics
from server.quotas import Quotas
from server.request_middleware import RequestMiddleware
from server.request_models import IgnoredFields
from server.search_routes import kept_routes, search_routes
from server.search_runner import SearchRunner
from server.service import ChatText, Service, own_version
from server.settings import Settings
from server.tokenizing import Tokenizing
from server.tree_log import TreeLog

if TYPE_CHECKING:  # OpenTelemetry costs its import where it is configured only
    from server.tracing import Tracing


def create_service(
    settings: Settings,
    engine: Engine,
    text: ChatText,
    delimiter: str = "\n\n",
    trees: TreeLog | None = None,
    traces: Tracing | None = None,
) -> Service:
    """A server's parts over a running engine, which stays its caller's to close, as do traces.

    Raises SettingsError for API keys that cannot be read.
    """
    ignored = IgnoredFields()
    metrics = Metrics(ignored)
    can = engine.capabilities
    metrics.serves(settings.model, can.engine, own_version(), can.kernel)
    keys = ApiKeys.load(settings)
    admission = Admission(
        settings.max_running,
        settings.max_queued,
        settings.retry_after_seconds,
        settings.max_bodies_bytes,
        metrics.queue_wait.observe,
    )
    metrics.queue.set_function(lambda: admission.waiting)
    return Service(
        settings=settings,
        runner=_runner(engine, metrics, settings, traces),
        text=text,
        metrics=metrics,
        ignored=ignored,
        store=SearchStore(settings, time.monotonic),
        trees=trees or TreeLog(None),
        keys=keys,
        quotas=Quotas(keys.names, metrics),
        admission=admission,
        delimiter=delimiter,
        traces=traces,
    )


def add_model(
    service: Service, settings: Settings, engine: Engine, text: ChatText, delimiter: str = "\n\n"
) -> None:
    """Let a service serve one more model, ``settings.model``, beside its own."""
    can = engine.capabilities
    service.metrics.serves(settings.model, can.engine, own_version(), can.kernel)
    service.others[settings.model] = replace(
        service,
        settings=settings,
        runner=_runner(engine, service.metrics, settings, service.traces),
        text=text,
        delimiter=delimiter,
        typical_cost=TypicalCost(),
        tokenizing=Tokenizing(),
        others={},
    )


def _runner(
    engine: Engine, metrics: Metrics, settings: Settings, traces: Tracing | None
) -> SearchRunner:
    if traces is None:
        return SearchRunner(engine, metrics, settings.answers)
    grow, reply = traces.searching(search), traces.completing(complete)
    return SearchRunner(engine, metrics, settings.answers, grow, reply)


async def _nothing() -> None:
    return None


def create_app(service: Service, at_end: Callable[[], Awaitable[None]] = _nothing) -> FastAPI:
    """The app over a service; at shutdown it cancels what is under way, then awaits ``at_end``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()
        await at_end()

    settings = service.settings
    bodies = BodyLimits(settings)
    service.metrics.arriving.set_function(lambda: len(bodies))
    app = FastAPI(
        title="Hedgerow",
        version=own_version(),
        description="An OpenAI-compatible server for test-time search",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    api_errors.install(app, settings.retry_after_seconds)
    app.add_middleware(
        AuthMiddleware,
        settings=settings,
        keys=service.keys,
        admission=service.admission,
        bodies=bodies,
        quotas=service.quotas,
        draining=service.draining,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "last-event-id", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(
        RequestMiddleware,
        metrics=service.metrics,
        retry_seconds=settings.retry_seconds,
        root_path=settings.root_path,
    )
    if service.traces is not None:
        app.add_middleware(service.traces.requests)
    for routes in (chat_routes, search_routes, kept_routes, ops_routes, page_routes):
        app.include_router(routes(service))
    describe(app)
    app.state.service = service
    return app
