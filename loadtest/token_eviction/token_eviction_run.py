"""A search under ArborKV's extractive mode or one of its baselines, for `loadtest.kv`."""

from __future__ import annotations

import time

from kvpolicy.token_allocation import Floors
from loadtest.configs import STEP_TOKENS
from loadtest.in_process import InProcess, ModelsInProcess
from loadtest.kv_rows import KvRun
from loadtest.searches import Item, Method, grow
from loadtest.token_eviction.path_cache import PathReader
from loadtest.token_eviction.token_eviction_engine import TokenEvictionEngine
from search.spec import SearchSpec

PUBLISHED = Floors()
"""The paper's floors, for nodes of 128 tokens."""
NODE_TOKENS = 128


def floors_for(task: str) -> Floors:
    """K_min and L_tail as the same share of a task's longest step as the paper's of its nodes."""
    tokens = max(1, PUBLISHED.tokens * STEP_TOKENS[task] // NODE_TOKENS)
    return Floors(PUBLISHED.ratio, tokens, tokens)


async def run_token_eviction(
    models: ModelsInProcess,
    reader: PathReader,
    item: Item,
    spec: SearchSpec,
    policy: str,
    *,
    budget: int,
    share: float,
) -> KvRun:
    """Run one search in a budget; the embedded engine scores. ``share``: of its tokens that a
    stream keeps.

    A search under token eviction may have longer paths than the same one at full retention, each
    of which fits the budget: they end where the budget does.
    """
    prompt = models.text.encode_chat([{"role": "user", "content": item.question}])
    longest = min(spec.trajectory_tokens, budget - len(prompt) + 1)
    spec = spec.model_copy(update={"trajectory_tokens": longest})
    others = InProcess(models, kv_tokens=1)
    start = time.perf_counter()
    engine = TokenEvictionEngine(
        reader,
        others,
        prompt,
        policy,
        budget,
        share=share,
        floors=floors_for(item.task),
    )
    outcome = await grow(engine, item, Method(policy, spec))
    return KvRun.of(
        item,
        outcome,
        budget=budget,
        peak=engine.spent.kv_tokens_peak,
        active=engine.active_peak,
        again_seconds=engine.again_seconds,
        policy_seconds=engine.policy_seconds,
        seconds=time.perf_counter() - start,
    )
