"""OpenTelemetry spans of requests and of searches, sent by OTLP where that is configured.

Imported only then. A search's spans are made from outside: from the calls it makes of its engine
and from the events it tells. Attributes are those of the GenAI semantic conventions; what these
have no name for begins with ``hedgerow.``. No span holds a prompt or a reply.

    POST /v1/search
    └─ chat sprig                    the search
       └─ round
          ├─ embed                   where the policy compares steps, the first time
          ├─ decide                  until the engine is told what is planned
          ├─ expand                  one step for each branch
          │  └─ evict, rehydrate     by the engine meanwhile, for whatever search: what it did,
          │                          not when; rehydrating is prefilling, and has no length here
          ├─ score
          └─ embed                   beside score, where the policy has compared steps before
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from search.controller import Problem
from search.engine import Engine
from search.events import Event
from search.outcome import Outcome
from search.spec import SearchSpec
from server.completion import Completion, PlainReply
from server.traced_engine import TracedEngine

OTLP_PATH = "/v1/traces"
UNTRACED = frozenset({"/health", "/ready", "/metrics"})
SERVER_ERROR = 500
MOST_EVENTS = 1 << 20
"""Of a span: every step of a large tree. By itself OpenTelemetry drops all but the last 128."""

Search = Callable[..., Awaitable[Outcome]]
Complete = Callable[..., Awaitable[PlainReply]]


def by_otlp(endpoint: str) -> BatchSpanProcessor:
    """Sends spans to a collector such as ``http://127.0.0.1:4318``, in the background."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + OTLP_PATH))


class Traces:
    """Makes the spans of one server that serves ``model``."""

    def __init__(self, processor: SpanProcessor, model: str, version: str) -> None:
        """OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME are heeded."""
        own = {"service.name": "hedgerow", "service.version": version}
        self._provider = TracerProvider(
            span_limits=SpanLimits(max_events=MOST_EVENTS),
            resource=Resource.create(own).merge(OTELResourceDetector().detect()),
        )
        self._provider.add_span_processor(processor)
        self._model = model
        self.tracer = self._provider.get_tracer("hedgerow", version)

    async def close(self) -> None:
        """Send what is left."""
        await asyncio.to_thread(self._provider.shutdown)

    def requests(self, app: ASGIApp) -> TracedRequests:
        """An app, traced."""
        return TracedRequests(app, self.tracer)

    def searching(self, search: Search) -> Search:
        """``search.controller.search``, traced."""

        async def traced(
            problem: Problem,
            spec: SearchSpec,
            engine: Engine,
            *,
            listen: Callable[[Event], None] | None = None,
            **more: Any,
        ) -> Outcome:
            with self.tracer.start_as_current_span(f"chat {self._model}") as span:
                span.set_attributes(self._asked(problem, spec))
                traced = TracedEngine(engine, self.tracer, span, self._model)

                def hear(event: Event) -> None:
                    traced.hear(event)
                    if listen is not None:
                        listen(event)

                try:
                    outcome = await search(problem, spec, traced, listen=hear, **more)
                finally:
                    traced.end()
                span.set_attributes(_answered(outcome))
                return outcome

        return traced

    def completing(self, complete: Complete) -> Complete:
        """``server.completion.complete``, traced."""

        async def traced(
            wanted: Completion, engine: Engine, tree_id: str, on_text: Callable[[str], None]
        ) -> PlainReply:
            with self.tracer.start_as_current_span(f"chat {self._model}") as span:
                span.set_attributes(
                    self._about(wanted.prompt)
                    | {
                        "gen_ai.request.max_tokens": wanted.limit,
                        "gen_ai.request.seed": wanted.seed,
                        "gen_ai.request.temperature": wanted.temperature,
                        "gen_ai.request.top_p": wanted.top_p,
                    }
                )
                traced = TracedEngine(engine, self.tracer, span, self._model)
                reply = await complete(wanted, traced, tree_id, on_text)
                span.set_attribute("gen_ai.response.finish_reasons", (reply.finish_reason,))
                span.set_attribute("gen_ai.usage.output_tokens", reply.tokens)
                return reply

        return traced

    def _about(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "hedgerow",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": len(prompt),
        }

    def _asked(self, problem: Problem, spec: SearchSpec) -> dict[str, Any]:
        return self._about(problem.prompt) | {
            "gen_ai.request.seed": spec.seed or 0,
            "gen_ai.request.temperature": spec.temperature,
            "gen_ai.request.top_p": spec.top_p,
            "gen_ai.request.max_tokens": spec.trajectory_tokens,
            "hedgerow.search.policy": spec.policy,
            "hedgerow.search.width": spec.width,
        }


def _answered(outcome: Outcome) -> dict[str, Any]:
    stats = outcome.stats
    return {
        "gen_ai.response.finish_reasons": (outcome.stop_reason.value,),
        "gen_ai.usage.output_tokens": stats.generated_tokens,
        "hedgerow.search.rounds": stats.rounds,
        "hedgerow.search.nodes": stats.nodes,
        "hedgerow.search.tree_digest": outcome.digest,
        "hedgerow.kv.tokens_peak": stats.engine.kv_tokens_peak,
        "hedgerow.kv.rehydrated_tokens": stats.engine.rehydrated_tokens,
    }


class TracedRequests:
    """Wraps the app: a span for every request but probes and scrapes, below its caller's."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        caller = propagate.extract(dict(Headers(scope=scope)))
        method = scope["method"]
        with self._tracer.start_as_current_span(method, caller, SpanKind.SERVER) as span:
            span.set_attribute("http.request.method", method)

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_response(span, message)
                await send(message)

            try:
                await self._app(scope, receive, send_noted)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


def _note_response(span: Span, message: Message) -> None:
    status = message["status"]
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("hedgerow.request_id", Headers(raw=message["headers"])["x-request-id"])
    if status >= SERVER_ERROR:
        span.set_status(StatusCode.ERROR)
