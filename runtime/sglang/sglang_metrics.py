"""Counts from SGLang servers' ``/metrics``."""

from __future__ import annotations

from runtime.servers.server_metrics import ServerMetrics, series_sums

SERIES = {
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


def parse_metrics(text: str) -> ServerMetrics:
    """Parse a server's ``/metrics``."""
    sums = series_sums(text)
    counts = {name: int(sums[f"sglang:{series}"]) for name, series in SERIES.items()}
    return ServerMetrics(**counts, evicting=sums["sglang:eviction_duration_seconds_sum"])
