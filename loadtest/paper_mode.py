"""A search in paper mode or under one of its lossy peers, for `loadtest.kv`."""

from __future__ import annotations

import time
from typing import Any

from kvpolicy.extractive import Floors
from loadtest.configs import STEP_TOKENS
from loadtest.figure3 import Moment
from loadtest.in_process import InProcess, Models
from loadtest.kv_rows import Run
from loadtest.searches import Item, Method, grow
from runtime.lossy.drawing import Drawing
from runtime.lossy.engine import LossyEngine, LossyModel
from runtime.lossy.options import LossyOptions
from runtime.lossy.spent import TokenEvictionCounters
from search.spec import SearchSpec

PUBLISHED = Floors()
"""For nodes of 128 tokens."""
NODE_TOKENS = 128


def floors_for(task: str) -> Floors:
    """K_min and L_tail as the same share of a task's longest step as the paper's of its nodes."""
    tokens = max(1, PUBLISHED.tokens * STEP_TOKENS[task] // NODE_TOKENS)
    return Floors(PUBLISHED.ratio, tokens, tokens)


async def run_lossy(
    models: Models,
    model: LossyModel,
    item: Item,
    spec: SearchSpec,
    policy: str,
    *,
    budget: int,
    share: float,
) -> tuple[Run, list[Moment]]:
    """One search in a budget, and its KV after every pass. ``share``: of its tokens that a stream
    keeps. Scoring is the embedded engine's.

    A lossy search may run into paths longer than any that full retention came to: they end where
    the budget does, which holds all of its paths.
    """
    prompt = models.text.encode_chat([{"role": "user", "content": item.question}])
    longest = min(spec.trajectory_tokens, budget - len(prompt) + 1)
    spec = spec.model_copy(update={"trajectory_tokens": longest})
    seen: list[Moment] = []
    drawings: list[Drawing] = []

    def watch(spent: TokenEvictionCounters, active: int, held: int) -> None:
        seen.append(Moment(spent.model_calls, active, held))

    def new_drawing(*given: Any) -> Drawing:
        drawings.append(Drawing(*given, watch=watch))
        return drawings[-1]

    options = LossyOptions(policy, budget, share, floors_for(item.task))
    engine = LossyEngine(model, InProcess(models, kv_tokens=1), options, new_drawing)
    start = time.perf_counter()
    outcome = await grow(engine, models.text, item, Method(policy, spec))
    seconds = time.perf_counter() - start
    spent = drawings[0].spent
    run = Run.of(
        item,
        outcome,
        budget=budget,
        peak=spent.kv_tokens_peak,
        active=spent.active,
        again_seconds=spent.again_seconds,
        policy_seconds=spent.policy_seconds,
        seconds=seconds,
    )
    return run, seen
