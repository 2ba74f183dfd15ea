"""What does a quarter of the KV cost? ArborKV's budget sweep and scaling test.

`python -m loadtest.kv [--quick] [--json]`. Every search runs at full retention first;
then each policy has a budget that is a share (rho) of the most it held; what a branch under way
reads stays even beyond the budget, and nothing else does. Searches run one at a time, as in the
paper, in this process (`loadtest.in_process`): KV is looked at after every step, and every search
has a budget of its own.

`--policy` takes the server's exact policies (full, lru, arborkv), those that evict tokens
(`loadtest.token_eviction`; under a policy of streams a path keeps rho of its tokens) and the groups
`paper` and `ablations`. Every budget is by the exact engine's full retention.

`least_tokens`: what the best eviction order, which knows the whole search, would have computed
again within the same peak (`loadtest.least_read`), with the steps drawn one after the other.

With `--keep FILE` a measurement of hours goes on where an earlier run ended; `--split dev` asks the
questions that constants are chosen on.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from loadtest.kv_plan import (
    CONFIGS,
    EXACT,
    FULL_RETENTION,
    GROUPS,
    QUICK,
    Case,
    Cell,
    KvPlan,
    cases_of,
)
from loadtest.kv_rows import COLUMNS, KvRun, row
from loadtest.kv_run import KvSearches, options_of
from loadtest.on_sglang import to_its_end
from loadtest.options import BenchmarkParser, at_least, planned
from loadtest.policy_events import event_us
from loadtest.report import publish, say, say_row
from loadtest.searches import Item, items_of
from loadtest.token_eviction.token_eviction_policies import TOKEN_EVICTION
from models.tasks import TASKS
from models.tasks.task import Split
from search.policies.registry import POLICIES


async def measure(plan: KvPlan) -> list[dict[str, Any]]:
    """Measure all rows, case by case."""
    searches = KvSearches(plan)
    worth = searches.models.options.value_params()
    names = dict.fromkeys((FULL_RETENTION, *plan.policies))
    events = {name: event_us(EXACT[name], worth=worth) for name in names if name in EXACT}
    rows = []
    for case in cases_of(plan):
        cells = await _cells(plan, searches, case)
        for (policy, rho), runs in cells.items():
            means = row(runs, cells[FULL_RETENTION, 1.0])
            rows.append(
                {
                    "policy": policy,
                    "rho": rho,
                    "task": case.task,
                    "search": case.search,
                    "config": case.config,
                    "parallel": case.spec.parallel,
                    "expansions": case.spec.expansions,
                    "seed": plan.seed,
                    "signals": worth.theta.signals,
                }
                | means
                | {"policy_us_p50": events.get(policy)}
            )
            say_row(rows[-1], COLUMNS)
    return rows


async def _cells(plan: KvPlan, searches: KvSearches, case: Case) -> dict[Cell, list[KvRun]]:
    """A search's runs by policy and rho, full retention's first."""
    cells: dict[Cell, list[KvRun]] = {(FULL_RETENTION, 1.0): []}
    for number, item in enumerate(items_of(case.task, plan.split, plan.questions, plan.seed)):
        by_cell = await _runs_of(plan, searches, case, item, backwards=number % 2 == 1)
        for cell, run in by_cell.items():
            cells.setdefault(cell, []).append(run)
        say(f"{case.task} {case.search} {case.config}: {number + 1} of {plan.questions}")
    return cells


async def _runs_of(
    plan: KvPlan, searches: KvSearches, case: Case, item: Item, *, backwards: bool
) -> dict[Cell, KvRun]:
    """Run one question at full retention, then under every policy in every budget."""
    reference = await searches.run(case, item, FULL_RETENTION, 1.0, None)
    cells: list[Cell] = [(policy, rho) for rho in plan.rhos for policy in plan.policies]
    whole: Cell = (FULL_RETENTION, 1.0)
    runs = dict.fromkeys([whole, *cells], reference)
    for policy, rho in cells[::-1] if backwards else cells:
        if (policy, rho) != whole:
            runs[policy, rho] = await searches.run(case, item, policy, rho, reference)
    return runs


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = _parser()
    options = parser.parse_args()
    plan = _plan(parser, options)
    start = time.monotonic()
    rows = to_its_end(measure(plan))
    document = {
        "rows": rows,
        "threads": plan.threads or os.cpu_count(),
        "seconds": time.monotonic() - start,
    }
    publish(document, options.json, "ArborKV: KV budgets", COLUMNS)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "kv", __doc__, "quick", "keep", "seed", "threads", limit="questions of a task"
    )
    parser.by_commas("task", "tasks", TASKS)
    parser.by_commas("search", "searches", POLICIES, "search policies")
    parser.by_commas("config", "configs", CONFIGS)
    policies = (*EXACT, *TOKEN_EVICTION, *GROUPS)
    parser.by_commas("policy", "policies", policies, "KV policies, groups too")
    parser.by_commas("rho", "rhos", float, "shares of full retention's peak")
    parser.by_commas("parallel", "parallel", int, "leaves expanded a round")
    parser.add_argument(
        "--active", action="store_true", help="no budget below what full retention reads at once"
    )
    parser.add_argument("--split", choices=get_args(Split), help="whose questions; default test")
    parser.add_argument("--expansions", type=at_least(1), help="overrides configs S and L")
    parser.add_argument("--theta", type=Path, help="what arborkv values steps by")
    return parser


def _plan(parser: BenchmarkParser, options: argparse.Namespace) -> KvPlan:
    """The full or quick plan with what the options change; a wrong one ends the program."""
    plan = planned(QUICK if options.quick else KvPlan(), options)
    names = chain.from_iterable(GROUPS.get(name, (name,)) for name in plan.policies)
    plan = replace(plan, policies=list(dict.fromkeys(names)))
    try:
        options_of(plan)
    except ValueError as error:
        parser.error(f"--theta: {error}")
    return plan


if __name__ == "__main__":
    main()
