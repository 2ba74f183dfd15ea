"""The engine's state and what trees have cost, put together from what each model booked."""

from __future__ import annotations

from runtime.embedded.account import Account
from runtime.embedded.judge_scorer import JudgeScorer
from runtime.embedded.messages import Report
from runtime.embedded.reward_scorer import RewardScorer
from runtime.embedded.scheduler import Scheduler
from search.engine import TreeCost, Usage


def report_of(
    scheduler: Scheduler,
    scorer: RewardScorer | None,
    judge: JudgeScorer | None,
    *,
    wrong_books: int,
    call_faults: int,
) -> Report:
    """The state by now. ``wrong_books``, ``call_faults``: how often so far."""
    policy, prm = scheduler.totals(), scorer.totals() if scorer else Account(0)
    judged = judge.totals() if judge else Account(0)
    cache, prm_cache = scheduler.cache, scorer.cache if scorer else None
    usage = Usage(
        kv_tokens_active=cache.active_tokens,
        kv_tokens_cached=cache.cached_tokens,
        kv_tokens_capacity=cache.capacity,
        kv_tokens_peak=cache.active_peak,
        prm_kv_tokens_active=prm_cache.active_tokens if prm_cache else 0,
        prm_kv_tokens_cached=prm_cache.cached_tokens if prm_cache else 0,
        prm_kv_tokens_capacity=prm_cache.capacity if prm_cache else 0,
        running=scheduler.running,
        waiting=scheduler.waiting,
        decoded_tokens_total=policy.decoded_tokens - judged.decoded_tokens,
        prefilled_tokens_total=policy.prefilled_tokens - judged.prefilled_tokens,
        cached_tokens_total=policy.cached_tokens - judged.cached_tokens,
        prm_tokens_total=prm.prefilled_tokens + judged.computed_tokens,
        evicted_tokens_total=cache.evicted_tokens,
        rehydrated_tokens_total=policy.rehydrated_tokens,
        rehydrations_total=policy.rehydrations,
        prm_kv_tokens_peak=prm_cache.active_peak if prm_cache else 0,
        held_evicted_tokens_total=cache.radix.held_evicted,
        prm_evicted_tokens_total=prm_cache.evicted_tokens if prm_cache else 0,
        prm_held_evicted_tokens_total=prm_cache.radix.held_evicted if prm_cache else 0,
        kv_policy_seconds_total=cache.evictor.seconds,
        retractions_total=scheduler.retractions,
        wrong_books_total=wrong_books,
        target_passes_total=policy.target_passes,
        drafted_tokens_total=policy.drafted_tokens,
        accepted_tokens_total=policy.accepted_tokens,
        speculated_used_tokens_total=policy.speculated_used,
        speculated_wasted_tokens_total=policy.speculated_wasted,
        call_faults_total=call_faults,
    )
    counters = {
        "trims": cache.evictor.evictions,
        "kv_policy_us": int(1e6 * cache.evictor.seconds),
        "held_evicted_tokens": cache.radix.held_evicted,
        "retractions": scheduler.retractions,
        "tested_tokens": policy.tested_tokens,
        "draft_pauses": scheduler.speculation.pace.pauses if scheduler.speculation else 0,
        "deduplicated_tokens": policy.deduplicated_tokens,
        "prm_evicted_tokens": prm_cache.evicted_tokens if prm_cache else 0,
        "verdicts": judge.verdicts if judge else 0,
        "unparsed_verdicts": judge.unparsed_verdicts if judge else 0,
        "call_faults": call_faults,
        "wrong_books": wrong_books,
    }
    return Report(usage, counters)


def cost_of(policy: Account, prm: Account, judged: Account) -> TreeCost:
    """What a tree cost, by what each model booked for it."""
    return TreeCost(
        decoded_tokens=policy.decoded_tokens,
        prefilled_tokens=policy.prefilled_tokens,
        cached_tokens=policy.cached_tokens,
        prm_tokens=prm.prefilled_tokens + judged.computed_tokens,
        model_calls=policy.passes + prm.passes + judged.passes,
        flops=policy.flops + prm.flops + judged.flops,
        kv_tokens_peak=policy.peak,
        rehydrated_tokens=policy.rehydrated_tokens,
        rehydrations=policy.rehydrations,
        target_passes=policy.target_passes,
        drafted_tokens=policy.drafted_tokens,
        tested_tokens=policy.tested_tokens,
        accepted_tokens=policy.accepted_tokens,
        speculated_used=policy.speculated_used,
        speculated_wasted=policy.speculated_wasted,
        deduplicated_tokens=policy.deduplicated_tokens,
    )
