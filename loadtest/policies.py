"""What do search policies cost, and what does saving KV buy? Tables 1 and 2 of ETS.

`python -m loadtest.policies [--quick] [--json]`. First every policy on the same test questions:
accuracy, FLOPs, KV. Then, timed in turns, in pools of a share of REBASE's peak: problems a second
with 4 to 32 searches at once, and what deciding costs. REBASE's peak is what the engine holds with
the fewest searches at once and room for all; the reward model's pool is the same for everybody.
`--choose weight` sweeps ETS's budget weight on dev instead, and writes what it chose. Without
questions to time (`--timed 0`) there is only the comparison. With `--keep FILE` this goes on where
an earlier run, which takes hours, ended.

`--engine sglang`: the same on two SGLang servers on the CPU, started anew for every pool, our
plug-in at work. A peak is what its searches hold, looked at after every round. Trees are equal up
to rounding: `same_trees` says so, and where they are not `overhead_vs_replay` is null.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from loadtest import budget_weight
from loadtest.compare import Results, compare
from loadtest.on_sglang import sglang_engine, to_its_end
from loadtest.options import BenchmarkParser, at_least, planned
from loadtest.policy_rows import COLUMNS, PolicyCell
from loadtest.report import publish, say, say_row
from loadtest.searches import Item, Method, embedded, items_of
from loadtest.throughput import LEAST_POOL, EngineFactory, peak_of, roomy, time_pool
from models.tasks import TASKS
from search.policies.policy import LevelPolicy, Round, Scores, by_reward
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.tree import Node, Tree

ENGINES: Mapping[str, EngineFactory] = {"embedded": embedded, "sglang": sglang_engine}
BASELINE = "rebase"
CEILING = "keep one"
SIDE_BY_SIDE = 4
"""Questions compared at once."""

PRM_SHARE = 2
"""KV of the reward model, as a multiple of REBASE's peak."""


@dataclass(frozen=True, slots=True)
class KeepOne(LevelPolicy):
    """Every round the leaf with the highest reward gets the remaining width; ties: the lower id.

    A round then holds one path and the width's candidates, about as little as a policy that spends
    its width can hold: a yardstick for KV alone, since nothing diverse survives.
    """

    width: int
    scores: ClassVar[Scores] = Scores.ALL

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Give the best leaf the whole width."""
        best, *rest = by_reward(leaves, "keep one")
        return Round({best.id: spend}, tuple(sorted(node.id for node in rest)))


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What is measured. ``questions`` are compared, the first ``timed`` of them timed as well.

    ``until``: by ``time.monotonic``; no further repeat begins after it. ``kept_in``: the file of
    results of the comparison.
    """

    tasks: Sequence[str]
    policies: Sequence[str]
    widths: Sequence[int]
    pools: Sequence[float]
    at_once: Sequence[int]
    questions: int
    timed: int
    repeats: int
    seed: int = 0
    threads: int = 0
    until: float = float("inf")
    kept_in: Path | None = None
    engine: str = "embedded"

    @property
    def engines(self) -> EngineFactory:
        """The factory of the plan's engines."""
        return ENGINES[self.engine]

    def another(self) -> bool:
        """Whether there is time for another repeat."""
        return time.monotonic() < self.until


FULL = PolicyPlan(
    tasks=("blocksworld", "wordproblem"),
    policies=("rebase", "beam", "dvts", "ets"),
    widths=(16, 64, 256),
    pools=(0.5, 1.0),
    at_once=(4, 8, 16, 32),
    questions=400,
    timed=32,
    repeats=3,
)
QUICK = replace(
    FULL,
    tasks=("blocksworld",),
    policies=("rebase", "ets"),
    widths=(16, 256),
    at_once=(4,),
    questions=4,
    timed=4,
    repeats=2,
)
QUICK_ON_SGLANG = {"widths": (16,), "at_once": (2,), "questions": 2, "timed": 2, "repeats": 1}
"""Changes to the quick plan there: in SGLang's plain CPU path a token takes many times as long."""
QUICK_SECONDS = 80.0
"""After this long the quick plan begins no second repeat."""


def methods_of(plan: PolicyPlan, task: str) -> list[Method]:
    """Every policy at every width, and ``KeepOne`` at each."""
    methods = []
    for width in plan.widths:
        methods += [Method(p, budget_weight.spec_for(p, width, task)) for p in plan.policies]
        spec = SearchSpec(policy=BASELINE, width=width)
        methods.append(Method(CEILING, spec, lambda spec: KeepOne(spec.width)))
    return methods


async def measure(plan: PolicyPlan) -> list[dict[str, Any]]:
    """Measure all rows, task by task and width by width."""
    rows = []
    for task in plan.tasks:
        items = items_of(task, "test", plan.questions, plan.seed)
        async with roomy(plan.engines, max(plan.widths) * SIDE_BY_SIDE, plan.threads) as engine:
            all_results = await compare(
                engine,
                items,
                methods_of(plan, task),
                at_once=SIDE_BY_SIDE,
                keep_rounds=plan.timed,
                kept_in=plan.kept_in,
            )
        for width in plan.widths:
            mine = {r.method.name: r for r in all_results if r.method.spec.width == width}
            rows += (await _cell(plan, task, items[: plan.timed], mine)).rows()
            for row in rows[-(len(plan.pools) if plan.timed else 1) * len(plan.policies) :]:
                say_row(row, COLUMNS)
    return rows


async def _cell(
    plan: PolicyPlan, task: str, timed: Sequence[Item], results: dict[str, Results]
) -> PolicyCell:
    """Time one task and width in every pool, the largest first; not at all without ``timed``."""
    ceiling = results.pop(CEILING)
    if not timed:
        return PolicyCell(task, plan.seed, results, BASELINE, ceiling, 0, {})
    method = results[BASELINE].method
    peak = await peak_of(plan.engines, method, timed, min(plan.at_once), plan.threads)
    timings = {}
    for pool in sorted(plan.pools, reverse=True):
        say(f"{task}, width {method.spec.width}: timing in {pool:g} of {peak:,} tokens")
        timings[pool] = await time_pool(
            plan.engines,
            list(results.values()),
            timed,
            pool_tokens=round(pool * peak),
            prm_tokens=PRM_SHARE * peak + LEAST_POOL,
            at_once=plan.at_once,
            replay=pool == max(plan.pools),
            repeats=plan.repeats,
            threads=plan.threads,
            another=plan.another,
        )
        if not timings[pool].same_trees:
            say("  the timed trees are not those that were compared: see same_trees")
    return PolicyCell(task, plan.seed, results, BASELINE, ceiling, peak, timings)


async def choose(plan: PolicyPlan) -> list[dict[str, Any]]:
    """Choose ETS's budget weight for every task and width, and record it."""
    rows = []
    async with roomy(plan.engines, max(plan.widths) * SIDE_BY_SIDE, plan.threads) as engine:
        for task in plan.tasks:
            rows += await budget_weight.choose(
                engine, task, plan.widths, plan.questions, plan.seed, SIDE_BY_SIDE, plan.kept_in
            )
    budget_weight.record(rows)
    return rows


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = _parser()
    options = parser.parse_args()
    plan = _plan(parser, options)
    if options.choose == "weight":
        rows = to_its_end(choose(plan))
        publish({"rows": rows}, options.json, "budget weights", budget_weight.COLUMNS)
        return
    start = time.monotonic()
    rows = to_its_end(measure(plan))
    document = {
        "rows": rows,
        "engine": plan.engine,
        "threads": (plan.threads or os.cpu_count()) if plan.engine == "embedded" else None,
        "seconds": time.monotonic() - start,
    }
    publish(document, options.json, "ETS, tables 1 and 2", COLUMNS)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "policies",
        __doc__,
        *("limit", "repeats", "seed", "keep", "threads"),
        quick="one task, few questions, minutes",
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="embedded", help="what runs the models"
    )
    parser.add_argument("--choose", choices=("weight",), help="choose this number of ETS on dev")
    parser.by_commas("task", "tasks", TASKS)
    parser.by_commas("policy", "policies", POLICIES, "rebase is added")
    parser.by_commas("width", "widths", int)
    parser.by_commas("pool", "pools", float, "shares of REBASE's peak")
    parser.by_commas("at-once", "at_once", int, "concurrent searches")
    parser.add_argument("--timed", type=at_least(0), help="questions timed, of those compared")
    return parser


def _plan(parser: BenchmarkParser, options: argparse.Namespace) -> PolicyPlan:
    """The full or quick plan with what the options change; a wrong one ends the program."""
    plan = QUICK if options.quick else FULL
    if options.engine == "sglang":
        plan = replace(plan, **QUICK_ON_SGLANG) if options.quick else plan
        if options.threads is not None:
            parser.error(f"--threads {options.threads}: the embedded engine's alone")
    plan = planned(plan, options)
    if options.quick:
        plan = replace(plan, until=time.monotonic() + QUICK_SECONDS)
    others = [name for name in plan.policies if name != BASELINE]
    return replace(plan, policies=[BASELINE, *others], timed=min(plan.timed, plan.questions))


if __name__ == "__main__":
    main()
