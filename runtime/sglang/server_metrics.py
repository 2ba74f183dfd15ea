"""What SGLang servers count themselves."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hedgerow_sglang.plugin_protocol import plugin_counts
from runtime.sglang.replica import Replica
from search.engine import EngineDown

_LINE = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


def _series(name: str) -> Any:
    return field(default=0, metadata={"series": name})


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Tokens and requests, by SGLang's own count, totals since the servers' start.

    ``held``: in use by running requests, and with our plug-in by all searches in flight;
    ``cached``: evictable beside that; ``evicting``: seconds spent on making room.
    """

    held: int = _series("kv_used_tokens")
    cached: int = _series("kv_evictable_tokens")
    capacity: int = _series("max_total_num_tokens")
    evicted: int = _series("evicted_tokens_total")
    running: int = _series("num_running_reqs")
    waiting: int = _series("num_queue_reqs")
    prompt: int = _series("prompt_tokens_total")
    generated: int = _series("generation_tokens_total")
    hit: int = _series("cached_tokens_total")
    evicting: float = _series("eviction_duration_seconds_sum")


def parse_metrics(text: str) -> ServerMetrics:
    """A server's ``/metrics``; what it does not report is 0."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in _LINE.findall(text):
        sums[name] += float(value)
    values = {one.name: sums[one.metadata["series"]] for one in fields(ServerMetrics)}
    whole = {name: int(value) for name, value in values.items() if name != "evicting"}
    return ServerMetrics(**whole, evicting=values["evicting"])


async def fleet_metrics(replicas: Sequence[Replica]) -> ServerMetrics:
    """The sum over those servers that answer."""
    several = await asyncio.gather(*map(_metrics_of, replicas))
    names = [one.name for one in fields(ServerMetrics)]
    return ServerMetrics(**{name: sum(getattr(one, name) for one in several) for name in names})


async def _metrics_of(replica: Replica) -> ServerMetrics:
    """All zero for a server that does not answer."""
    if not replica.up:
        return ServerMetrics()
    try:
        text = await replica.metrics()
        counts = plugin_counts(await replica.info()) if replica.plugged else None
    except EngineDown:
        return ServerMetrics()
    metrics = ServerMetrics() if text is None else parse_metrics(text)
    if counts is None:
        return metrics
    held, evicted = counts["held_tokens"], counts["evicted_tokens"]
    return replace(metrics, held=held, cached=counts["cached_tokens"] - held, evicted=evicted)
