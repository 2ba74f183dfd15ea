"""Spans: a search's shape in time, sent by OTLP if that is configured."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from search.counters import EngineCounters, Usage
from search.engine import KvMoved
from server.app import create_app
from server.lifecycle import traces_of
from server.service import create_service
from server.settings import Settings, SettingsError
from server.tracing import Tracing
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question

CHAT = "/v1/chat/completions"
ETS = {"policy": "ets", "width": 4}
SEARCH = {"model": "sprig", "messages": question(), "search": ETS, "seed": 1}
STREAM = {"question": "What is it?", "search": ETS | {"seed": 1}, "stream": True}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GENAI = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """An exporter that keeps every span."""
    return InMemorySpanExporter()


@pytest.fixture
async def traced(
    settings: Settings, engine: ScriptedEngine, exporter: InMemorySpanExporter
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server whose spans are kept."""
    traces = Tracing(SimpleSpanProcessor(exporter), "sprig", "1.0")
    app = create_app(create_service(settings, engine, PlainText(), traces=traces))
    async with client_over(app) as client:
        yield client


def children_of(spans: tuple[ReadableSpan, ...], parent: ReadableSpan) -> list[ReadableSpan]:
    """Return a span's children in the order of their start."""
    parent_id = parent.context.span_id if parent.context else None
    children = [span for span in spans if span.parent and span.parent.span_id == parent_id]
    return sorted(children, key=lambda span: span.start_time or 0)


WORK = ["decide", "expand", "score"]
ROUNDS = (
    *(WORK, ["embed", *WORK], [*WORK, "embed"], ["embed", *WORK, "embed"]),
    *([], ["embed"]),
)
"""Orders of the work in a round; the last two are of a round that did not come about."""


def names(spans: list[ReadableSpan]) -> list[str]:
    """Return the names of these spans."""
    return [span.name for span in spans]


async def test_a_request_holds_a_search_and_its_rounds(
    traced: httpx2.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    """Request, search, rounds; a round has the work of ETS, in its order and inside its time."""
    completion = (await traced.post(CHAT, json=SEARCH, headers={"traceparent": CALLER})).json()
    spans = exporter.get_finished_spans()
    [request] = [span for span in spans if span.name == f"POST {CHAT}"]
    assert request.parent is not None
    assert f"{request.parent.trace_id:032x}" in CALLER
    attributes = request.attributes or {}
    assert attributes["http.response.status_code"] == 200
    assert attributes["hedgerow.request_id"]
    [search] = children_of(spans, request)
    rounds = children_of(spans, search)
    assert set(names(rounds)) == {"round"}
    full_rounds = [span for span in rounds if "hedgerow.round" in (span.attributes or {})]
    assert len(full_rounds) == completion["search"]["stats"]["rounds"] > 1
    for span in rounds:
        inside = children_of(spans, span)
        assert names(inside) in ROUNDS
        for child in inside:
            assert (span.start_time or 0) <= (child.start_time or 0)
            assert (child.end_time or 0) <= (span.end_time or 0)
    orders = [names(children_of(spans, span)) for span in full_rounds]
    assert any(inside[0] == "embed" for inside in orders), "before it has ever compared steps"
    assert any(inside[-1] == "embed" for inside in orders), "beside the scores"


async def test_attributes_follow_the_genai_conventions(
    traced: httpx2.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    """Names are the conventions' or ours; the counts are the response's; no text is sent."""
    search_reply = (await traced.post(CHAT, json=SEARCH)).json()
    plain_reply = (await traced.post(CHAT, json=SEARCH | {"search": None, "max_tokens": 5})).json()
    spans = exporter.get_finished_spans()
    for span in spans:
        for name, value in (span.attributes or {}).items():
            assert name in GENAI or name.startswith(("hedgerow.", "http."))
            assert "What is it?" not in str(value)
    search, plain_draw = (span.attributes or {} for span in spans if span.name == "chat sprig")
    for attributes, reply in ((search, search_reply), (plain_draw, plain_reply)):
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.request.model"] == "sprig"
        assert attributes["gen_ai.request.seed"] == 1
        assert attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
        assert attributes["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert search["hedgerow.search.policy"] == "ets"
    assert search["hedgerow.search.tree_digest"] == search_reply["search"]["tree_digest"]
    assert search["gen_ai.response.finish_reasons"] == (search_reply["search"]["stop_reason"],)


async def test_scores_have_spans_of_their_own(
    traced: httpx2.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    """The request, its scoring, and one engine call per level."""
    body = {"question": "What is it?", "steps": ["a", "b"]}
    (await traced.post("/v1/score", json=body)).raise_for_status()
    spans = exporter.get_finished_spans()
    [request] = [span for span in spans if span.name == "POST /v1/score"]
    [score_span] = children_of(spans, request)
    assert score_span.name == "score sprig"
    assert (score_span.attributes or {})["hedgerow.replies"] == 1
    calls = children_of(spans, score_span)
    assert names(calls) == ["score", "score"]
    assert [(call.attributes or {})["hedgerow.trajectories"] for call in calls] == [1, 1]
    assert not any("What is it?" in str(span.attributes) for span in spans)


async def test_tracing_changes_no_tree(
    traced: httpx2.AsyncClient, http: httpx2.AsyncClient
) -> None:
    """The same request with and without spans has the same digest."""
    with_spans = (await traced.post(CHAT, json=SEARCH)).json()
    without = (await http.post(CHAT, json=SEARCH)).json()
    assert with_spans["search"]["tree_digest"] == without["search"]["tree_digest"]


async def test_what_the_engine_gave_up_meanwhile_hangs_below_expand(
    traced: httpx2.AsyncClient,
    engine: ScriptedEngine,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every expand evicts 5 tokens in a second and brings back 2."""

    async def usage() -> Usage:
        calls = len(engine.expanded)
        counters = EngineCounters(
            evicted_tokens=5 * calls, rehydrated_tokens=2 * calls, kv_policy_seconds=1.0 * calls
        )
        return Usage(totals=counters)

    monkeypatch.setattr(engine, "usage", usage)
    await traced.post(CHAT, json=SEARCH)
    spans = exporter.get_finished_spans()
    expands = [span for span in spans if span.name == "expand"]
    for span in expands:
        evict, rehydrate = sorted(children_of(spans, span), key=lambda span: span.name)
        assert (evict.name, rehydrate.name) == ("evict", "rehydrate")
        assert (evict.attributes or {})["hedgerow.kv.tokens"] == 5
        assert (rehydrate.attributes or {})["hedgerow.kv.tokens"] == 2
        assert (evict.end_time or 0) - (evict.start_time or 0) == 1_000_000_000


async def test_what_became_of_the_kv_is_heard_through_the_spans(
    traced: httpx2.AsyncClient,
    engine: ScriptedEngine,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's report of evictions gets through the spans; it is an event of the round."""

    def kv_moved(tree: str) -> KvMoved:
        return KvMoved(held=50, capacity=100, cached={1: 0})

    monkeypatch.setattr(engine, "kv_moved", kv_moved, raising=False)
    answer = await traced.post("/v1/search", json=STREAM)
    assert "event: evicted" in answer.text
    spans = exporter.get_finished_spans()
    events = [event for span in spans if span.name == "round" for event in span.events]
    assert {event.name for event in events} == {"evicted"}
    assert (events[0].attributes or {})["hedgerow.node"] == 1


async def test_a_failed_search_is_an_error_and_probes_are_not_traced(
    traced: httpx2.AsyncClient, engine: ScriptedEngine, exporter: InMemorySpanExporter
) -> None:
    """The request's span and the search's have the error; all spans are ended."""
    engine.fail_at = 1
    for path in ("/health", "/ready", "/metrics"):
        await traced.get(path)
    assert exporter.get_finished_spans() == ()
    assert (await traced.post(CHAT, json=SEARCH)).status_code == 503
    spans = exporter.get_finished_spans()
    failed_names = Counter(span.name for span in spans if not span.status.is_ok)
    assert failed_names >= Counter(["chat sprig", f"POST {CHAT}", "expand"])


class Collector:
    """An OTLP collector over HTTP that keeps the requests that it gets."""

    def __init__(self) -> None:
        requests: Queue[ExportTraceServiceRequest] = Queue()
        self.requests = requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    raise AssertionError("sent plain unless asked")
                requests.put(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on a free port."""
    running = Collector()
    yield running
    running.server.shutdown()
    running.server.server_close()


async def test_spans_are_sent_by_otlp(collector: Collector, engine: ScriptedEngine) -> None:
    """A server with HEDGEROW_OTLP_ENDPOINT sends its searches under its name and version."""
    settings = Settings(otlp_endpoint=collector.url)
    traces = traces_of(settings)
    assert traces is not None
    app = create_app(create_service(settings, engine, PlainText(), traces=traces))
    async with client_over(app) as client:
        await client.post(CHAT, json=SEARCH)
    await traces.close()
    [resource] = collector.requests.get(timeout=30).resource_spans
    attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert attributes["service.name"] == "hedgerow"
    kinds = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert kinds == {f"POST {CHAT}", "chat sprig", "round", "decide", "expand", "score", "embed"}


def test_without_an_endpoint_there_are_none() -> None:
    """Without a collector there is no tracer, so spans cost nothing."""
    assert traces_of(Settings()) is None


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, "server.tracing", None)
    with pytest.raises(SettingsError, match=r"install hedgerow\[traces\]"):
        traces_of(Settings(otlp_endpoint="http://127.0.0.1:4318"))


def test_a_large_trees_events_are_all_told(exporter: InMemorySpanExporter) -> None:
    """By default OpenTelemetry keeps only the last 128 events of a span."""
    traces = Tracing(SimpleSpanProcessor(exporter), "sprig", "1.0")
    with traces.tracer.start_as_current_span("round") as span:
        for node in range(1000):
            span.add_event("evicted", {"hedgerow.node": node})
    [round_span] = exporter.get_finished_spans()
    assert (len(round_span.events), round_span.dropped_events) == (1000, 0)
