"""What SGLang servers report of their KV and queues, summed over the servers of a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hedgerow_sglang.plugin_protocol import plugin_counts
from runtime.sglang.replica import Replica
from search.engine import EngineDown

_LINE = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Tokens and requests, by SGLang's own count, totals since the servers' start.

    ``held``: in use by running requests, and with our plug-in by all searches in flight;
    ``cached``: evictable beside that; ``evicting``: seconds spent on making room.
    """

    held: int = 0
    cached: int = 0
    capacity: int = 0
    evicted: int = 0
    running: int = 0
    waiting: int = 0
    prompt: int = 0
    generated: int = 0
    hit: int = 0
    evicting: float = 0.0


NAMES = {
    "held": "kv_used_tokens",
    "cached": "kv_evictable_tokens",
    "capacity": "max_total_num_tokens",
    "evicted": "evicted_tokens_total",
    "running": "num_running_reqs",
    "waiting": "num_queue_reqs",
    "prompt": "prompt_tokens_total",
    "generated": "generation_tokens_total",
    "hit": "cached_tokens_total",
}
SECONDS = "eviction_duration_seconds_sum"


def parse_metrics(text: str) -> ServerMetrics:
    """A server's ``/metrics``; what it does not report is 0."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    whole = {field: int(sums.get(name, 0)) for field, name in NAMES.items()}
    return ServerMetrics(**whole, evicting=sums.get(SECONDS, 0.0))


async def fleet_metrics(replicas: Sequence[Replica]) -> ServerMetrics:
    """The sum over those servers that answer."""
    reports = [one for one in await asyncio.gather(*map(_of, replicas)) if one is not None]
    whole = {field: sum(getattr(one, field) for one in reports) for field in NAMES}
    return ServerMetrics(**whole, evicting=sum(one.evicting for one in reports))


async def _of(replica: Replica) -> ServerMetrics | None:
    if not replica.up:
        return None
    try:
        text = await replica.metrics()
        told = plugin_counts(await replica.info()) if replica.plugged else None
    except EngineDown:
        return None
    found = ServerMetrics() if text is None else parse_metrics(text)
    if told is None:
        return found
    held, evicted = told["held_tokens"], told["evicted_tokens"]
    return replace(found, held=held, cached=told["cached_tokens"] - held, evicted=evicted)
