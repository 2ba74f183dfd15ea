"""Metrics for operators: Prometheus series, all prefixed ``hedgerow_``, in base units.

Labels come from closed sets only: policies, stop reasons, routes, the models that are served
(``served``), an engine's models by their part (``model``), the names of configured keys.
``docs/metrics.md`` says which question each series answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from search.counters import EngineCounters, Usage
from search.outcome import Outcome

WAITS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
GOODPUT = (1, 3, 10, 30, 100, 300, 1000, 3000)
NODES = (1, 4, 16, 64, 256, 1024, 4096)
ABOUT = ("engine", "kernel", "model", "version")

disable_created_metrics()  # they would add an unused series per counter and bucket


class Metrics:
    """The series of one server, in a registry of its own."""

    def __init__(self) -> None:
        """Register all series, without a model."""
        self.registry = CollectorRegistry()
        self.engines = EngineSeries()
        self.registry.register(self.engines)
        self._info = self._gauge("info", "What is served, and by what.", *ABOUT)
        self.searches = self._count("searches", "Searches that ended.", "policy", "stop_reason")
        self.in_flight = self._gauge("searches_in_flight", "Searches under way.", "policy")
        self.generated = self._count("generated_tokens", "Tokens of committed trees.")
        self.kept = self._count("kept_tokens", "Those on the paths of finished trajectories.")
        self.pruned = self._count("pruned_tokens", "Those on no finished trajectory's path.")
        self.unread_answers = self._count(
            "unread_answers", "Answers like maths that were compared by their spelling alone."
        )
        self.scores = self._count("scores", "Rewards given for steps that clients had.")
        self.policy_seconds = self._count("policy_seconds", "Time spent on planning.", "policy")
        self.rounds = self._count("rounds", "Rounds that were planned and grown.", "policy")
        self.solver_fallbacks = self._count(
            "solver_fallbacks", "Rounds planned by a policy's simpler rule.", "policy"
        )
        self.embedder_fallbacks = self._count(
            "embedder_fallbacks", "Rounds whose steps could not be compared.", "policy"
        )
        self.search_seconds = self._spread(
            "search_seconds", "Duration of searches.", SECONDS, "policy"
        )
        self.search_nodes = self._spread("search_nodes", "Steps of a tree.", NODES, "policy")
        self.goodput = self._spread(
            "precise_goodput_tokens_per_second",
            "Mean tokens of a search's finished trajectories over their mean completion time.",
            GOODPUT,
        )
        self.request_seconds = self._spread(
            "request_seconds", "Duration of requests, streams included.", SECONDS, "route", "status"
        )
        self.tasks = self._gauge("asyncio_tasks", "Tasks of the server's event loop.")
        self.requests_in_flight = self._gauge("requests_in_flight", "Requests being answered.")
        self.key_tokens = self._count("key_tokens", "Tokens used by each key.", "key", "kind")
        self.ignored = self._count("ignored_fields", "Unknown request fields ignored.")
        self.refusals = self._count("refusals", "Requests turned away at the gate.", "code")
        self.arriving = self._gauge("requests_arriving", "Requests whose bodies are on their way.")
        self.queue = self._gauge("requests_waiting", "Requests that wait for their turn.")
        self.queue_wait = self._spread(
            "queue_wait_seconds", "Time that requests waited for their turn.", WAITS
        )
        self.disconnects = self._count("disconnects", "Clients that left before their answer.")
        self.unwritten_trees = self._count(
            "unwritten_trees", "Trees that could not be written to the file of trees."
        )
        self.engine_restarts = self._count(
            "engine_restarts", "Times a dead engine was restarted.", "served"
        )

    def serves(self, model: str, engine: str, version: str, kernel: str = "") -> None:
        """Set the ``info`` series of a model: its engine, the kernel that computes attention and
        this server's version."""
        self._info.labels(model=model, engine=engine, version=version, kernel=kernel).set(1)
        self.engine_restarts.labels(model)

    @contextmanager
    def in_flight_of(self, policy: str) -> Iterator[None]:
        """Count a search as running; count it as cancelled or failed if it raises."""
        with self.in_flight.labels(policy).track_inprogress():
            try:
                yield
            except asyncio.CancelledError:
                self.searches.labels(policy, "cancelled").inc()
                raise
            except Exception:
                self.searches.labels(policy, "error").inc()
                raise

    def count_search(self, outcome: Outcome) -> None:
        """Count a search that ended."""
        policy, stats = outcome.spec.policy, outcome.stats
        finished_tokens = _finished_tokens(outcome)
        self.searches.labels(policy, outcome.stop_reason.value).inc()
        self.generated.inc(stats.generated_tokens)
        self.kept.inc(finished_tokens)
        self.pruned.inc(stats.generated_tokens - finished_tokens)
        self.policy_seconds.labels(policy).inc(stats.policy_seconds)
        self.rounds.labels(policy).inc(stats.rounds)
        self.solver_fallbacks.labels(policy).inc(stats.solver_fallbacks)
        self.embedder_fallbacks.labels(policy).inc(stats.embedder_fallbacks)
        self.search_seconds.labels(policy).observe(stats.seconds)
        self.search_nodes.labels(policy).observe(stats.nodes)
        if stats.precise_goodput:
            self.goodput.observe(stats.precise_goodput)

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"hedgerow_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"hedgerow_{name}", what, labels, registry=self.registry)

    def _spread(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"hedgerow_{name}", what, labels, buckets=buckets, registry=self.registry)


class EngineSeries(Collector):
    """Collects series from the last usage report of every engine, by the model that it serves."""

    def __init__(self, counters: type[EngineCounters] = EngineCounters) -> None:
        self._counters = counters
        self._reports: dict[str, Usage] = {}
        self._up: dict[str, float] = {}

    def note_usage(self, model: str, usage: Usage | None) -> None:
        """Store what a model's engine reported for this scrape, None if it did not answer."""
        self._up[model] = float(usage is not None)
        if usage is not None:
            self._reports[model] = usage

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        up = {(model,): up for model, up in self._up.items()}
        what = "1 when the engine answered this scrape."
        yield _family(GaugeMetricFamily, "engine_up", what, ("served",), up)
        for kind, name, what, labels, values in ENGINE_SERIES:
            series = {
                (model, *key): value
                for model, usage in self._reports.items()
                for key, value in values(usage).items()
            }
            yield _family(kind, name, what, ("served", *labels), series)
        for field in fields(self._counters):
            if (metric := field.metadata["metric"]) is None:
                continue
            kind = GaugeMetricFamily if field.metadata["maximum"] else CounterMetricFamily
            series = {
                (model,): getattr(usage.totals, field.name)
                for model, usage in self._reports.items()
            }
            yield _family(kind, metric or field.name, field.metadata["help"], ("served",), series)


Values = Mapping[tuple[str, ...], float]
"""A series' values by the values of its labels."""


def _tokens(usage: Usage) -> Values:
    return {
        ("policy", "active"): usage.kv_tokens_active,
        ("policy", "cached"): usage.kv_tokens_cached,
        ("reward", "active"): usage.prm_kv_tokens_active,
        ("reward", "cached"): usage.prm_kv_tokens_cached,
    }


def _evicted(usage: Usage) -> Values:
    totals = usage.totals
    active, prm_active = totals.held_evicted_tokens, totals.prm_held_evicted_tokens
    return {
        ("policy", "active"): active,
        ("policy", "cached"): totals.evicted_tokens - active,
        ("reward", "active"): prm_active,
        ("reward", "cached"): totals.prm_evicted_tokens - prm_active,
    }


def _room(usage: Usage) -> Values:
    return {("policy",): usage.kv_tokens_capacity, ("reward",): usage.prm_kv_tokens_capacity}


def _peak(usage: Usage) -> Values:
    return {("policy",): usage.kv_tokens_peak, ("reward",): usage.prm_kv_tokens_peak}


def _branches(usage: Usage) -> Values:
    return {("running",): usage.running, ("waiting",): usage.waiting}


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

ENGINE_SERIES: list[tuple[Family, str, str, tuple[str, ...], Callable[[Usage], Values]]] = [
    (GaugeMetricFamily, "kv_tokens", "KV held, in tokens.", ("model", "state"), _tokens),
    (GaugeMetricFamily, "kv_capacity_tokens", "Room for KV, in tokens.", ("model",), _room),
    (GaugeMetricFamily, "kv_peak_tokens", "Most active KV since the start.", ("model",), _peak),
    (
        CounterMetricFamily,
        "evicted_tokens",
        "Tokens dropped under pressure.",
        ("model", "state"),
        _evicted,
    ),
    (GaugeMetricFamily, "branches", "Branches in the engine.", ("state",), _branches),
]
"""The series of an engine's report: kind, name, meaning, labels and values of each."""


def _family(
    kind: Family,
    name: str,
    what: str,
    labels: tuple[str, ...],
    values: Values,
) -> Metric:
    family = kind(f"hedgerow_{name}", what, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _finished_tokens(outcome: Outcome) -> int:
    nodes = {step.id for node in outcome.tree.finished() for step in outcome.tree.chain(node.id)}
    return sum(len(outcome.tree[node_id].tokens) for node_id in nodes)
