"""What a server holds while it has no requests."""

from __future__ import annotations

import asyncio
import time

import httpx

from loadtest.served import Served, values

SETTLE_SECONDS = 1.0
REST_SECONDS = 10.0
"""Seconds after which anything still held counts as held for good."""
COUNTS = {
    "searches": ("hedgerow_searches_in_flight", {}),
    "replies": ("hedgerow_searches_in_flight", {"policy": "plain"}),
    "branches": ("hedgerow_branches", {}),
    "waiting": ("hedgerow_requests_waiting", {}),
    "arriving": ("hedgerow_requests_arriving", {}),
    "requests": ("hedgerow_requests_in_flight", {}),
    "kv_tokens": ("hedgerow_kv_tokens", {"state": "active"}),
    "tasks": ("hedgerow_asyncio_tasks", {}),
}


async def counts(http: httpx.AsyncClient) -> dict[str, float]:
    """The server's counts by name, this request for them included."""
    text = (await http.get("/metrics")).text
    return {name: sum(values(text, metric, **of)) for name, (metric, of) in COUNTS.items()}


async def counts_at_rest(served: Served, base: dict[str, float] | None = None) -> dict[str, float]:
    """Counts at rest, with open files and MB; with a ``base``, once the server is back at it or
    after REST_SECONDS."""
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        until = time.monotonic() + (SETTLE_SECONDS if base is None else REST_SECONDS)
        while True:
            now = await counts(http) | {"files": served.open_files()}
            back = base is not None and not more(now, base)
            if back or time.monotonic() > until:
                break
            await asyncio.sleep(0.1)
    return now | {"mb": round(served.memory() / 1e6, 1)}


def more(now: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    """Counts above ``base``, except memory: allocators keep some of it, so it is only reported."""
    return {
        name: count - base[name]
        for name, count in now.items()
        if name != "mb" and count > base[name]
    }
