"""A row of `loadtest.kv`: means over searches under one KV policy in one budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.evaluation import judge
from cli.intervals import wilson95
from loadtest.searches import Item
from models.tasks import TASKS
from search.outcome import Outcome
from search.spec import StopReason
from search.tree import combined_digest

MOST_SHARE = 0.27
"""Largest share of full retention's peak (section 8 of the design): a quarter, and a step more."""

COLUMNS = (
    "task",
    "search",
    "config",
    "parallel",
    "policy",
    "rho",
    "completed",
    "accuracy",
    "peak_ratio_vs_full",
    "active_ratio_vs_full",
    "identical_trees",
    "rehydrations",
    "recomputed_tokens",
    "least_tokens",
    "rehydration_share",
    "policy_share",
    "policy_us_p50",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class KvRun:
    """One search in one budget. Tokens are of the policy model's KV.

    ``peak``: held at most; ``active``: the most that running branches read or wrote at once;
    ``recomputed``: evicted and computed again, in ``rehydrations`` prefills that took
    ``again_seconds`` of the ``seconds``; ``policy_seconds``: spent on deciding; ``longest``: the
    tokens of its longest path with its next step; ``least_tokens``: what the best eviction order
    would have computed again (`loadtest.least_read`), None under token eviction.
    """

    correct: bool
    completed: bool
    digest: str
    rehydrations: int
    recomputed: int
    decoded: int
    budget: int
    peak: int
    active: int
    again_seconds: float
    policy_seconds: float
    seconds: float
    longest: int = 0
    least_tokens: int | None = None

    @classmethod
    def of(cls, item: Item, outcome: Outcome, **measured: Any) -> KvRun:
        """The run of a search; ``measured``: the fields from ``budget`` on."""
        cost = outcome.stats.engine
        return cls(
            correct=judge(TASKS[item.task], item.question, outcome).correct,
            completed=outcome.stop_reason is not StopReason.KV,
            digest=outcome.digest,
            rehydrations=cost.rehydrations,
            recomputed=cost.rehydrated_tokens,
            decoded=cost.decoded_tokens,
            **measured,
        )


def row(runs: Sequence[KvRun], full: Sequence[KvRun]) -> dict[str, Any]:
    """Means over the searches, and their largest peak; ``full``: the same at full retention.

    ``within``: the share of searches whose peak is at most 0.27 of full retention's or, if that is
    more, full retention's largest active set. Shares of time are of all searches' time.
    """
    n = len(runs)
    seconds = math.fsum(run.seconds for run in runs)
    accuracy = sum(run.correct for run in runs) / n
    pairs = list(zip(runs, full, strict=True))
    within = sum(run.peak <= max(MOST_SHARE * base.peak, base.active) for run, base in pairs)
    best = [run.least_tokens for run in runs if run.least_tokens is not None]
    return {
        "n": n,
        "completed": sum(run.completed for run in runs) / n,
        "accuracy": accuracy,
        "accuracy_ci95": wilson95(accuracy, n),
        "budget_tokens": math.fsum(run.budget for run in runs) / n,
        "peak_kv_tokens": max(run.peak for run in runs),
        "peak_ratio_vs_full": math.fsum(run.peak / base.peak for run, base in pairs) / n,
        "active_ratio_vs_full": math.fsum(base.active / base.peak for base in full) / n,
        "within": within / n,
        "identical_trees": sum(run.digest == base.digest for run, base in pairs) / n,
        "rehydrations": sum(run.rehydrations for run in runs) / n,
        "rehydration_share": math.fsum(run.again_seconds for run in runs) / seconds,
        "recomputed_tokens": sum(run.recomputed for run in runs) / n,
        "least_tokens": sum(best) / len(best) if best else None,
        "decoded_tokens": sum(run.decoded for run in runs) / n,
        "policy_share": math.fsum(run.policy_seconds for run in runs) / seconds,
        "seconds": seconds / n,
        "tree_digest": combined_digest(run.digest for run in runs),
    }
