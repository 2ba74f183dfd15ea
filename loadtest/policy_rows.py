"""A row of `loadtest.policies`: accuracy, FLOPs, KV and speed of one policy in one pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cli.intervals import wilson95
from loadtest.compare import Results
from loadtest.paired import bootstrap95, differences
from loadtest.throughput import Timing

COLUMNS = (
    "task",
    "policy",
    "width",
    "pool",
    "accuracy",
    "accuracy_diff_ci95",
    "kv_reduction_vs_rebase",
    "kv_ceiling",
    "throughput_vs_rebase",
    "decision_ms_p50",
    "overhead_vs_replay",
)


UNTIMED = dict.fromkeys(
    (
        *("pool", "pool_tokens", "rebase_peak_tokens", "problems_per_second"),
        *("throughput_vs_rebase", "at_once", "timed", "repeats", "same_trees"),
        *("decision_ms_p50", "decision_ms_p99", "decision_nodes_max", "overhead_vs_replay"),
    )
)
"""The timing columns of a row where nothing was timed."""


@dataclass(frozen=True, slots=True)
class PolicyCell:
    """One task and width: the comparison's results and the timing of each pool.

    ``peak``: REBASE's, in tokens; the pools are shares of it, if large enough to work in. Without
    ``timings`` nothing was timed.
    """

    task: str
    seed: int
    results: dict[str, Results]
    baseline: str
    ceiling: Results
    peak: int
    timings: dict[float, Timing]

    def rows(self) -> list[dict[str, Any]]:
        """A row per pool and policy, in the order given; untimed, a row per policy."""
        comparisons = {name: self._comparison(name) for name in self.results}
        if not self.timings:
            return [row | UNTIMED for row in comparisons.values()]
        decision_costs = {name: self._decision_cost(name) for name in self.results}
        return [
            comparisons[name] | self._timing(name, pool) | decision_costs[name]
            for pool in self.timings
            for name in self.results
        ]

    def _comparison(self, name: str) -> dict[str, Any]:
        """Columns that do not depend on the pool. Counts and costs are sums over the questions."""
        mine, baseline = self.results[name], self.results[self.baseline]
        kv = {
            which: results.total(lambda s: s.kv_tokens_total)
            for which, results in (("mine", mine), ("base", baseline), ("least", self.ceiling))
        }
        n = len(mine.results)
        return {
            "task": self.task,
            "policy": name,
            "width": mine.method.spec.width,
            "n": n,
            "seed": self.seed,
            "accuracy": mine.accuracy,
            "accuracy_ci95": wilson95(mine.accuracy, n),
            "accuracy_diff_ci95": bootstrap95(differences(mine.correct, baseline.correct)),
            "pass_at_n": sum(result.any_correct for result in mine.results) / n,
            "flops": mine.total(lambda s: s.engine.flops),
            "model_calls": int(mine.total(lambda s: s.engine.model_calls)),
            "generated_tokens": int(mine.total(lambda s: s.generated_tokens)),
            "prm_tokens": int(mine.total(lambda s: s.engine.prm_tokens)),
            "kv_tokens_total": int(kv["mine"]),
            "kv_tokens_peak": max(r.stats.kv_tokens_peak for r in mine.results),
            "kv_reduction_vs_rebase": kv["base"] / kv["mine"],
            "kv_ceiling": kv["base"] / kv["least"],
            "tree_digest": mine.digest,
        }

    def _timing(self, name: str, pool: float) -> dict[str, Any]:
        """Columns that depend on the pool."""
        timing = self.timings[pool]
        rate, at_once = timing.best(name)
        return {
            "pool": pool,
            "pool_tokens": timing.pool_tokens,
            "rebase_peak_tokens": self.peak,
            "problems_per_second": rate,
            "throughput_vs_rebase": rate / timing.best(self.baseline)[0],
            "at_once": at_once,
            "timed": timing.items,
            "repeats": timing.repeats,
            "same_trees": timing.same_trees,
        }

    def _decision_cost(self, name: str) -> dict[str, Any]:
        """The cost of deciding, in the largest pool with the fewest searches at once."""
        timing = self.timings[max(self.timings)]
        searches = timing.decisions[name]
        seconds = [s for search in searches for s in search.seconds]
        p50, p99 = np.quantile(seconds, (0.5, 0.99))
        return {
            "decision_ms_p50": 1e3 * float(p50),
            "decision_ms_p99": 1e3 * float(p99),
            "decision_nodes_max": max(n for search in searches for n in search.nodes),
            "overhead_vs_replay": timing.overhead(name),
        }
