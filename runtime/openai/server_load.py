"""What vLLM servers count themselves; of other servers nothing is known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from runtime.openai.completion_server import CompletionServer
from search.engine import EngineDown


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """``used``: tokens of KV that running requests hold; requests ``running`` and ``waiting``."""

    used: int = 0
    running: int = 0
    waiting: int = 0


async def read_metrics(servers: Sequence[CompletionServer]) -> ServerLoad:
    """The sum over those that answer."""
    loads = await asyncio.gather(*map(_load_of, servers))
    return ServerLoad(
        sum(load.used for load in loads),
        sum(load.running for load in loads),
        sum(load.waiting for load in loads),
    )


async def _load_of(server: CompletionServer) -> ServerLoad:
    if not server.up:
        return ServerLoad()
    try:
        return parse_load(await server.metrics(), server.kv_tokens)
    except EngineDown:
        return ServerLoad()


def parse_load(text: str, capacity: int) -> ServerLoad:
    """From ``/metrics``; ``capacity``: the server's, in tokens."""
    sums = {
        family.name: sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:")
    }
    return ServerLoad(
        int(sums.get("vllm:kv_cache_usage_perc", 0) * capacity),
        int(sums.get("vllm:num_requests_running", 0)),
        int(sums.get("vllm:num_requests_waiting", 0)),
    )
