"""The engine's state, put together from what its parts count."""

from __future__ import annotations

from runtime.embedded.judge_scorer import JudgeScorer, cost_of_judging
from runtime.embedded.reward_scorer import RewardScorer
from runtime.embedded.scheduler import Scheduler
from search.counters import EngineCounters
from search.engine import Usage


def usage_of(
    scheduler: Scheduler,
    scorer: RewardScorer | None,
    judge: JudgeScorer | None,
    *,
    call_errors: int,
    kv_accounting_errors: int,
) -> Usage:
    """The state by now. ``call_errors``, ``kv_accounting_errors``: how often."""
    cache, prm_cache = scheduler.cache, scorer.cache if scorer else None
    searches = scheduler.totals()
    if judge is not None:
        judging = judge.totals()
        searches = searches - judging + cost_of_judging(judging)
    if scorer is not None:
        searches.add(scorer.totals())
    totals = EngineCounters.of(
        searches,
        verdicts=judge.verdicts if judge else 0,
        evicted_tokens=cache.evicted_tokens,
        held_evicted_tokens=cache.radix.held_evicted,
        prm_evicted_tokens=prm_cache.evicted_tokens if prm_cache else 0,
        prm_held_evicted_tokens=prm_cache.radix.held_evicted if prm_cache else 0,
        evictions=cache.evictor.evictions,
        kv_policy_seconds=cache.evictor.seconds,
        preemptions=scheduler.preemptions,
        draft_pauses=scheduler.speculation.draft_length.pauses if scheduler.speculation else 0,
        call_errors=call_errors,
        kv_accounting_errors=kv_accounting_errors,
    )
    return Usage(
        kv_tokens_active=cache.active_tokens,
        kv_tokens_cached=cache.cached_tokens,
        kv_tokens_capacity=cache.capacity,
        kv_tokens_peak=cache.active_peak,
        prm_kv_tokens_active=prm_cache.active_tokens if prm_cache else 0,
        prm_kv_tokens_cached=prm_cache.cached_tokens if prm_cache else 0,
        prm_kv_tokens_capacity=prm_cache.capacity if prm_cache else 0,
        prm_kv_tokens_peak=prm_cache.active_peak if prm_cache else 0,
        running=scheduler.running,
        waiting=scheduler.waiting,
        totals=totals,
    )
