"""`loadtest.kv --engine sglang`: SGLang servers whose pools are the budgets.

What keeps KV there is SGLang's radix cache: `lru` and `priority` are a stock server's, `arborkv` is
our plug-in (docs/sglang-plugin.md). A case's questions have one pool, rho of what full retention
held of them on average, so that a server serves them all, one after the other, its cache emptied
between them. Full retention is our plug-in with room for everything: what it says that searches
hold. Every pool holds the longest path, its next step, and what SGLang keeps for itself. Two cells
run at once, steps are scored in the embedded engine.

Columns mean what they do there, by the servers' own reports: tokens recomputed by the
`cached_tokens` of every answer, a peak by what is cached after a round (SGLang fills its pool),
`policy_share` by SGLang's time for evictions. What SGLang does not tell is null: what running
branches read at once (`active_ratio_vs_full`, `within`), the time of prefills alone
(`rehydration_share`), an eviction's own (`policy_us_p50`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from loadtest.kv_plan import FULL_RETENTION, ROOMY, Case, Cell, KvPlan
from loadtest.kv_rows import KvRun
from loadtest.on_sglang import PYTHON, longest_path
from loadtest.report import say
from loadtest.searches import SPRIG, Item, Method, grow, items_of
from loadtest.sglang_drawing import Drawing, drawing_in
from loadtest.watched import WatchedEngine
from runtime.embedded.model.config import ModelConfig, footprint
from runtime.text import Text

ON_SGLANG = ("lru", "priority", "arborkv")
AT_ONCE = 2
"""Servers at a time: a machine of two cores has no use for more."""
NUMBER_BYTES = 4
_TIMES = ("policy_us_p50", "transition_us_p50", "pressure_us_p50", "boundary_us_p50")
UNTOLD: dict[str, Any] = {"signals": ("v",)} | dict.fromkeys(_TIMES)
"""Of every row: what values a step in our plug-in, and what SGLang does not tell."""


def token_bytes() -> int:
    """Of the policy's KV."""
    return footprint(ModelConfig.from_checkpoint(SPRIG.policy), NUMBER_BYTES).kv_bytes


async def cells_on_sglang(plan: KvPlan, case: Case) -> dict[Cell, list[KvRun]]:
    """A case's runs by policy and rho, full retention's first."""
    items = items_of(case.task, plan.split, plan.questions, plan.seed)
    room = asyncio.Semaphore(AT_ONCE)

    async def cell(policy: str, pool: int) -> list[tuple[KvRun, int]]:
        async with room:
            found = await _runs(case, items, policy, pool)
            say(f"{case.task} {case.search} {case.config}: {policy} in {pool:,} tokens")
            return found

    full = await cell(FULL_RETENTION, ROOMY)
    least = max(longest for _, longest in full)
    held = math.fsum(run.peak for run, _ in full) / len(full)
    asked = [
        (policy, rho, max(math.ceil(rho * held), least))
        for rho in plan.rhos
        for policy in plan.policies
    ]
    found = await asyncio.gather(*(cell(policy, pool) for policy, _, pool in asked))
    cells = {(FULL_RETENTION, 1.0): full} | {
        (policy, rho): runs for (policy, rho, _), runs in zip(asked, found, strict=True)
    }
    return {of: [run for run, _ in runs] for of, runs in cells.items()}


async def _runs(
    case: Case, items: Sequence[Item], policy: str, pool: int
) -> list[tuple[KvRun, int]]:
    """All questions on one server, one after the other."""
    text = Text(SPRIG.policy)
    kv_policy = "arborkv" if policy == FULL_RETENTION else policy
    async with drawing_in(PYTHON, kv_policy, pool) as engine:
        return [await _run(engine, text, case, item, policy, pool) for item in items]


async def _run(
    engine: Drawing, text: Text, case: Case, item: Item, policy: str, pool: int
) -> tuple[KvRun, int]:
    """One question, from an empty cache; and its longest path."""
    await engine.forget()
    watched, before = WatchedEngine(engine), await engine.usage()
    start = time.perf_counter()
    outcome = await grow(watched, text, item, Method(policy, case.spec))
    seconds = time.perf_counter() - start
    after = await engine.usage()
    run = KvRun.of(
        item,
        outcome,
        budget=pool,
        peak=watched.held if policy == FULL_RETENTION else watched.cached,
        active=None,
        again_seconds=None,
        policy_seconds=after.totals.kv_policy_seconds - before.totals.kv_policy_seconds,
        seconds=seconds,
    )
    return run, longest_path(outcome, case.spec, engine.capabilities.score_tokens)
