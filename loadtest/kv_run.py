"""A search under a KV policy in a budget, for `loadtest.kv`. Kept searches are not run again."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter

import kvpolicy
import loadtest.token_eviction
import runtime.embedded
import search
from cli.kept_lines import KeptLines
from loadtest.in_process import InProcess, ModelsInProcess
from loadtest.kept import code_of, of_search
from loadtest.kv_plan import EXACT, FULL_RETENTION, ROOMY, Case, KvPlan
from loadtest.kv_rows import KvRun
from loadtest.least_read import Draw, draws_of, least_read_again, one_by_one
from loadtest.searches import SPRIG, Item, Method, grow
from loadtest.token_eviction.path_cache import PathReader
from loadtest.token_eviction.token_eviction_policies import TOKEN_EVICTION
from loadtest.token_eviction.token_eviction_run import run_token_eviction
from runtime.embedded.choices import KvPolicy
from runtime.embedded.fingerprint import fingerprint
from runtime.embedded.options import EngineOptions

RUN = TypeAdapter(KvRun)


def options_of(plan: KvPlan) -> EngineOptions:
    """Engine options with room for all. Raises ValueError for a ``theta`` that cannot be used."""
    rooms = {"kv_tokens": ROOMY, "prm_kv_tokens": 2 * ROOMY}
    return replace(SPRIG, **rooms, threads=plan.threads, kv_theta=plan.theta)


class KvSearches:
    """Runs a plan's searches, one at a time, and keeps them in the plan's file if it names one."""

    def __init__(self, plan: KvPlan) -> None:
        options = options_of(plan)
        self.models = ModelsInProcess(options)
        token_eviction = any(name in TOKEN_EVICTION for name in plan.policies)
        self._paper = PathReader(options.policy) if token_eviction else None
        self._active = plan.active
        code = code_of(search, kvpolicy, runtime.embedded, loadtest.token_eviction)
        theta = plan.theta and hashlib.sha256(plan.theta.read_bytes()).hexdigest()[:16]
        provenance = f"{fingerprint(options, self.models.policy.attends)} {code} {theta}"
        self._store = KeptLines(plan.kept_in, provenance, RUN)

    async def run(
        self, case: Case, item: Item, policy: str, rho: float, reference: KvRun | None
    ) -> KvRun:
        """Run a question under a policy in a budget of rho times the peak of ``reference``, the
        run at full retention; None for that run itself."""
        name = f"{policy} at {rho:g}" if reference else FULL_RETENTION
        if reference and self._active:
            name += " or what is read"
        key = of_search(item, Method(name, case.spec))
        run = self._store.get(key)
        if run is None:
            if reference is None:
                run = await self._exact(case, item, EXACT[policy], ROOMY, ROOMY)
            else:
                budget = math.ceil(rho * reference.peak)
                if self._active:
                    budget = max(budget, reference.active)
                run = await self._in(case, item, policy, rho, budget, reference.longest)
            self._store.put(key, run)
        return run

    async def _in(
        self, case: Case, item: Item, policy: str, rho: float, budget: int, longest: int
    ) -> KvRun:
        pool = max(budget, longest)
        if policy in EXACT:
            return await self._exact(case, item, EXACT[policy], pool, budget)
        assert self._paper is not None, "loaded where a token-eviction policy is asked for"
        share = min(1.0, rho)
        return await run_token_eviction(
            self.models, self._paper, item, case.spec, policy, budget=pool, share=share
        )

    async def _exact(
        self, case: Case, item: Item, policy: KvPolicy, pool: int, budget: int
    ) -> KvRun:
        """Run one search in a budget.

        ``pool``: slots, enough for the longest path with its next step; ``budget``: beyond it
        only what is being read stays.
        """
        gc.collect()  # frees the last engine's KV: its parts refer to each other
        engine = InProcess(self.models, kv_policy=policy, kv_tokens=pool)
        cache = engine.scheduler.cache
        cache.budget = budget
        start = time.perf_counter()
        outcome = await grow(engine, item, Method(policy, case.spec))
        seconds = time.perf_counter() - start
        draws = one_by_one(_as_cached(draws_of(outcome)))
        return KvRun.of(
            item,
            outcome,
            budget=budget,
            peak=cache.active_peak,
            active=cache.reading_peak,
            again_seconds=engine.clocked.again_seconds,
            policy_seconds=cache.evictor.seconds,
            seconds=seconds,
            longest=engine.longest,
            least_tokens=least_read_again(draws, cache.active_peak),
        )


def _as_cached(draws: Sequence[Draw]) -> list[Draw]:
    """The same draws as the embedded engine's KV has them: a path's last token gets its KV only
    when the path goes on, and is always computed then."""
    return [(prefix[:-1], (prefix[-1], *step[:-1])) for prefix, step in draws]
