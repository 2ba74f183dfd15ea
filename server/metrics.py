"""What an operator watches: Prometheus series, all prefixed ``hedgerow_``, in base units.

Labels come from closed sets only: policies, stop reasons, routes, models by their part, the names
of configured keys. ``docs/metrics.md`` says which question each series answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from search.engine import Usage
from search.outcome import Outcome
from server.wire import IgnoredFields

WAITS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
GOODPUT = (1, 3, 10, 30, 100, 300, 1000, 3000)
NODES = (1, 4, 16, 64, 256, 1024, 4096)

ENGINE_COUNTERS = {
    "decoded_tokens": "Tokens the policy model decoded.",
    "prefilled_tokens": "Tokens the policy model prefilled, prompts and evicted prefixes alike.",
    "cached_tokens": "Prefix tokens that were found in the KV cache.",
    "prm_tokens": "Tokens the reward model read, or a judge read and wrote.",
    "rehydrated_tokens": "Tokens whose KV was dropped and computed again.",
    "target_passes": "Passes of the policy model that drew for a branch, each branch's counted.",
    "drafted_tokens": "Tokens the draft model proposed and the policy model checked.",
    "accepted_tokens": "Proposed tokens that were what the policy model drew.",
    "rehydrations": "Prefills that brought dropped KV back.",
    "retractions": "Branches that gave way for want of KV, to go on later.",
    "kv_policy_seconds": "Time spent on deciding which KV goes.",
    "wrong_books": "Times that the engine's own accounts of its KV did not add up.",
}


disable_created_metrics()  # a second series for each counter and bucket that nobody reads


class Metrics:
    """The series of one server, in a registry of its own."""

    def __init__(self, ignored: IgnoredFields, **about: str) -> None:
        """``about``: labels that tell this server from others, such as its version."""
        self.registry = CollectorRegistry()
        Info("hedgerow", "What is served, and by what.", registry=self.registry).info(about)
        self.engine = EngineSeries(ignored)
        self.registry.register(self.engine)
        self.searches = self._count("searches", "Searches that ended.", "policy", "stop_reason")
        self.in_flight = self._gauge("searches_in_flight", "Searches under way.", "policy")
        self.generated = self._count("generated_tokens", "Tokens of committed trees.")
        self.kept = self._count("kept_tokens", "Those on the paths of finished trajectories.")
        self.pruned = self._count("pruned_tokens", "Those on no finished trajectory's path.")
        self.unread_answers = self._count(
            "unread_answers", "Answers like maths that were compared by their spelling alone."
        )
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
        self.requests_in_flight = self._gauge("requests_in_flight", "Requests being answered.")
        self.key_tokens = self._count("key_tokens", "Tokens used by each key.", "key", "kind")
        self.refusals = self._count("refusals", "Requests turned away at the gate.", "code")
        self.queue = self._gauge("requests_waiting", "Requests that wait for their turn.")
        self.queue_wait = self._spread(
            "queue_wait_seconds", "Time that requests waited for their turn.", WAITS
        )
        self.disconnects = self._count("disconnects", "Clients that left before their answer.")
        self.engine_restarts = self._count("engine_restarts", "Times a dead engine was restarted.")

    def searched(self, outcome: Outcome) -> None:
        """Count a search that ended."""
        policy, stats = outcome.spec.policy, outcome.stats
        kept = _finished_tokens(outcome)
        self.searches.labels(policy, outcome.stop_reason.value).inc()
        self.generated.inc(stats.generated_tokens)
        self.kept.inc(kept)
        self.pruned.inc(stats.generated_tokens - kept)
        self.policy_seconds.labels(policy).inc(stats.policy_seconds)
        self.rounds.labels(policy).inc(stats.rounds)
        self.solver_fallbacks.labels(policy).inc(stats.solver_fallbacks)
        self.embedder_fallbacks.labels(policy).inc(stats.embedder_fallbacks)
        self.search_seconds.labels(policy).observe(stats.seconds)
        self.search_nodes.labels(policy).observe(stats.nodes)
        if stats.precise_goodput:
            self.goodput.observe(stats.precise_goodput)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _count(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"hedgerow_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"hedgerow_{name}", what, labels, registry=self.registry)

    def _spread(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"hedgerow_{name}", what, labels, buckets=buckets, registry=self.registry)


class EngineSeries(Collector):
    """Series read off the engine's last report. ``usage`` None: none yet; ``up``: it answered."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self.usage: Usage | None = None
        self.up = False
        self._ignored = ignored

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape."""
        up = GaugeMetricFamily("hedgerow_engine_up", "1 when the engine answered this scrape.")
        up.add_metric([], float(self.up))
        yield up
        yield CounterMetricFamily(
            "hedgerow_ignored_fields", "Unknown request fields ignored.", value=self._ignored.total
        )
        if self.usage is not None:
            yield from _kv(self.usage)
            for name, what in ENGINE_COUNTERS.items():
                total = getattr(self.usage, f"{name}_total")
                yield CounterMetricFamily(f"hedgerow_{name}", what, value=total)


def _kv(usage: Usage) -> Iterable[Metric]:
    held, prm_held = usage.held_evicted_tokens_total, usage.prm_held_evicted_tokens_total
    by_model = ("model",)
    by_state = ("model", "state")
    tokens = {
        ("policy", "active"): usage.kv_tokens_active,
        ("policy", "cached"): usage.kv_tokens_cached,
        ("reward", "active"): usage.prm_kv_tokens_active,
        ("reward", "cached"): usage.prm_kv_tokens_cached,
    }
    evicted = {
        ("policy", "active"): held,
        ("policy", "cached"): usage.evicted_tokens_total - held,
        ("reward", "active"): prm_held,
        ("reward", "cached"): usage.prm_evicted_tokens_total - prm_held,
    }
    room = {("policy",): usage.kv_tokens_capacity, ("reward",): usage.prm_kv_tokens_capacity}
    peak = {("policy",): usage.kv_tokens_peak, ("reward",): usage.prm_kv_tokens_peak}
    branches = {("running",): usage.running, ("waiting",): usage.waiting}
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield _family(gauge, "kv_tokens", "KV held, in tokens.", by_state, tokens)
    yield _family(gauge, "kv_capacity_tokens", "Room for KV, in tokens.", by_model, room)
    yield _family(gauge, "kv_peak_tokens", "Most active KV since the start.", by_model, peak)
    yield _family(counter, "evicted_tokens", "Tokens dropped under pressure.", by_state, evicted)
    yield _family(gauge, "branches", "Branches in the engine.", ("state",), branches)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    what: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    family = kind(f"hedgerow_{name}", what, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _finished_tokens(outcome: Outcome) -> int:
    kept = {step.id for node in outcome.tree.finished() for step in outcome.tree.chain(node.id)}
    return sum(len(outcome.tree[node_id].tokens) for node_id in kept)
