"""OpenTelemetry spans of requests and of searches, sent by OTLP where that is configured.

Imported only then. A search's spans are made from outside: from its calls of the engine and from
its events. Attributes are those of the GenAI semantic conventions; others begin with
``hedgerow.``. No span holds a prompt or a reply.

    POST /v1/search
    └─ chat sprig                    the search
       └─ round
          ├─ embed                   if the policy compares steps, the first time
          ├─ decide                  until the engine gets the hint with the plan
          ├─ expand                  one step for each branch
          │  └─ evict, rehydrate     by the engine meanwhile, for any search: their amounts, not
          │                          their times; rehydration is prefilling and has no length here
          ├─ score
          └─ embed                   beside score, if the policy has compared steps before
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.engine_wrapper import EngineWrapper
from search.controller import search
from search.counters import Usage
from search.engine import Branch, Engine, EngineError, Hint, Sampling, Step, Trajectory
from search.events import Event, Evicted, Pruned, Rehydrated, Selected
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from server.plain_completion import PlainCompletion, PlainReply, complete
from server.scoring import ReplySteps, Rewards, score_replies

OTLP_PATH = "/v1/traces"
UNTRACED = frozenset({"/health", "/ready", "/metrics"})
SERVER_ERROR = 500
NANOSECONDS = 1e9
MOST_EVENTS = 1 << 20
"""The most events of a span: a large tree's steps. OpenTelemetry's default is the last 128."""


def by_otlp(endpoint: str) -> BatchSpanProcessor:
    """A processor that sends spans to a collector such as ``http://127.0.0.1:4318``."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + OTLP_PATH))


class Tracing:
    """Makes the spans of one server that serves ``model``."""

    def __init__(self, processor: SpanProcessor, model: str, version: str) -> None:
        """OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the resource's attributes."""
        identity = {"service.name": "hedgerow", "service.version": version}
        self._provider = TracerProvider(
            span_limits=SpanLimits(max_events=MOST_EVENTS),
            resource=Resource.create(identity).merge(OTELResourceDetector().detect()),
        )
        self._provider.add_span_processor(processor)
        self._model = model
        self.tracer = self._provider.get_tracer("hedgerow", version)
        self.requests = partial(TracedRequests, tracer=self.tracer)

    async def close(self) -> None:
        """Send the spans that are not sent yet."""
        await asyncio.to_thread(self._provider.shutdown)

    async def search(
        self,
        problem: Problem,
        spec: SearchSpec,
        engine: Engine,
        *,
        listen: Callable[[Event], None] | None = None,
        **more: Any,
    ) -> Outcome:
        """``search.controller.search``, traced."""
        attrs = self._request_attributes(problem.prompt, spec, spec.trajectory_tokens) | {
            "hedgerow.search.policy": spec.policy,
            "hedgerow.search.width": spec.width,
        }
        with self.tracer.start_as_current_span(f"chat {self._model}", attributes=attrs) as span:
            traced = TracedEngine(engine, self.tracer, span, self._model)

            def on_event(event: Event) -> None:
                traced.on_event(event)
                if listen is not None:
                    listen(event)

            try:
                outcome = await search(problem, spec, traced, listen=on_event, **more)
            finally:
                traced.end()
            span.set_attributes(_outcome_attributes(outcome))
            return outcome

    async def complete(
        self,
        request: PlainCompletion,
        engine: Engine,
        tree_id: str,
        on_text: Callable[[str], None],
    ) -> PlainReply:
        """``server.plain_completion.complete``, traced."""
        attrs = self._request_attributes(request.prompt, request, request.limit)
        with self.tracer.start_as_current_span(f"chat {self._model}", attributes=attrs) as span:
            traced = TracedEngine(engine, self.tracer, span, self._model)
            reply = await complete(request, traced, tree_id, on_text)
            span.set_attribute("gen_ai.response.finish_reasons", (reply.finish_reason,))
            span.set_attribute("gen_ai.usage.output_tokens", reply.tokens)
            return reply

    async def score(
        self, replies: Sequence[ReplySteps], engine: Engine, tree_id: str, **more: Any
    ) -> list[Rewards]:
        """``server.scoring.score_replies``, traced."""
        attrs = {
            "gen_ai.operation.name": "score",
            "gen_ai.provider.name": "hedgerow",
            "gen_ai.request.model": self._model,
            "hedgerow.replies": len(replies),
        }
        with self.tracer.start_as_current_span(f"score {self._model}", attributes=attrs) as span:
            traced = TracedEngine(engine, self.tracer, span, self._model)
            return await score_replies(replies, traced, tree_id, **more)

    def _request_attributes(
        self, prompt: tuple[int, ...], how: SearchSpec | PlainCompletion, limit: int
    ) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "hedgerow",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": len(prompt),
            "gen_ai.request.seed": how.seed or 0,
            "gen_ai.request.temperature": how.temperature,
            "gen_ai.request.top_p": how.top_p,
            "gen_ai.request.max_tokens": limit,
        }


def _outcome_attributes(outcome: Outcome) -> dict[str, Any]:
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
    """ASGI middleware: a span for every request but probes and scrapes, below its caller's span."""

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
                    status, headers = message["status"], Headers(raw=message["headers"])
                    span.set_attribute("http.response.status_code", status)
                    span.set_attribute("hedgerow.request_id", headers["x-request-id"])
                    if status >= SERVER_ERROR:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_noted)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


class TracedEngine(EngineWrapper):
    """An engine wrapper that traces one tree. ``root``: its search's span; ``model``: the policy.

    The span ``decide`` lasts from a round's last event (``on_event``), or from its embeddings, to
    the hint of the next round. Between drawing a round's steps and the events about them a search
    may embed as well as score.
    """

    def __init__(self, engine: Engine, tracer: Tracer, root: Span, model: str) -> None:
        super().__init__(engine)
        self._tracer = tracer
        self._root = set_span_in_context(root)
        self._model = model
        self._round: Span | None = None
        self._number = 0
        self._last_event = time.time_ns()
        self._deciding_from: int | None = None
        self._after_expand = False

    def on_event(self, event: Event) -> None:
        """Note an event. Events of a plan come while it is made, before the hint."""
        if isinstance(event, Selected | Pruned) and event.round > self._number:
            self._begin()
        if isinstance(event, Evicted | Rehydrated) and self._round is not None:
            attrs = {"hedgerow.node": event.node, "hedgerow.kv.tokens_kept": event.kept}
            self._round.add_event(event.name, attrs)
        self._after_expand = False
        self._last_event = time.time_ns()

    def end(self) -> None:
        """End the last round's span; the search is over."""
        if self._round is not None:
            self._round.end(self._last_event)
            self._round = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw steps, traced, with child spans for what the engine evicted and rehydrated."""
        attrs = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "hedgerow.branches": len(branches),
        }
        before = await self._usage()
        with self._call("expand", attrs) as span:
            steps = await self._engine.expand(tree, branches, sampling)
            span.set_attribute("gen_ai.usage.output_tokens", sum(len(s.tokens) for s in steps))
            after = await self._usage()
            if before is not None and after is not None:
                self._kv_work(set_span_in_context(span), before, after)
        self._after_expand = True
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score trajectories, traced."""
        attrs = {"gen_ai.operation.name": "score", "hedgerow.trajectories": len(trajectories)}
        with self._call("score", attrs):
            return await self._engine.score(tree, prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Embed steps, traced: beside a round's scoring, or as the first call of a round."""
        beside = self._after_expand
        if not beside:
            self._begin()
        attrs = {"gen_ai.operation.name": "embeddings", "hedgerow.steps": len(trajectories)}
        with self._call("embed", attrs):
            vectors = await self._engine.embed(tree, prompt, trajectories)
        if not beside:
            self._deciding_from = time.time_ns()
        return vectors

    def hint(self, tree: str, hint: Hint) -> None:
        """Pass the hint on; the round is decided, so its ``decide`` span ends."""
        self._begin()
        assert self._round is not None, "a round has begun"
        self._number += 1
        self._round.set_attribute("hedgerow.round", self._number)
        decide = self._tracer.start_span("decide", self._parent(), start_time=self._deciding_from)
        decide.end()
        self._deciding_from = None
        self._engine.hint(tree, hint)

    def _begin(self) -> None:
        """Begin a new round's span, unless it has begun already."""
        if self._deciding_from is None:
            self.end()
            self._round = self._tracer.start_span("round", self._root, start_time=self._last_event)
            self._deciding_from = self._last_event

    def _parent(self) -> Context:
        return self._root if self._round is None else set_span_in_context(self._round)

    @contextmanager
    def _call(self, name: str, attrs: dict[str, Any]) -> Iterator[Span]:
        """A span below the round's, or below the root where there are no rounds."""
        with self._tracer.start_as_current_span(name, self._parent(), attributes=attrs) as span:
            yield span

    async def _usage(self) -> Usage | None:
        with suppress(EngineError):
            return await self._engine.usage()
        return None

    def _kv_work(self, parent: Context, before: Usage, after: Usage) -> None:
        """Make spans of the KV evicted and rehydrated during a call, for this search or others."""
        now = time.time_ns()
        evicted = after.totals.evicted_tokens - before.totals.evicted_tokens
        if evicted > 0:
            seconds = after.totals.kv_policy_seconds - before.totals.kv_policy_seconds
            start = now - int(seconds * NANOSECONDS)
            attrs = {"hedgerow.kv.tokens": evicted}
            self._tracer.start_span("evict", parent, attributes=attrs, start_time=start).end(now)
        rehydrated = after.totals.rehydrated_tokens - before.totals.rehydrated_tokens
        if rehydrated > 0:
            attrs = {"hedgerow.kv.tokens": rehydrated}
            span = self._tracer.start_span("rehydrate", parent, attributes=attrs, start_time=now)
            span.end(now)
