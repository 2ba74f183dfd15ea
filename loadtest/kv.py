"""What does a quarter of the KV cost? ArborKV's budget sweep and scaling test.

`python -m loadtest.kv [--quick] [--json] [--plot FILE]`. Every search runs at full retention first;
then each policy has a budget that is a share (rho) of what it held at most; what a branch under way
reads stays even beyond that, beside nothing else. Searches run one at a time, as in the paper, in
this process (`loadtest.in_process`): KV is looked at after every step, and every search has a
budget of its own.

`--policy` takes the server's exact policies (full, lru, arborkv), those that evict tokens
(`loadtest.token_eviction`; under a policy of streams a path keeps rho of its tokens) and the groups
`paper` and `ablations`. Every budget is by the exact engine's full retention.

`least_tokens` is what the best order there is, which knows the whole search, would have computed
again in what was held at most (`loadtest.least_read`), its steps drawn one after the other.

With `--keep FILE` a measurement of hours goes on where an earlier run ended; `--split dev` asks the
questions that constants are chosen on.

`--engine sglang`: the policy draws on a SGLang server on the CPU, one for every cell, whose pool is
the budget (`loadtest.kv_sglang`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from cli.accuracy_plot import check_path
from loadtest.figure3 import Moment, draw
from loadtest.kv_plan import (
    CONFIGS,
    EXACT,
    FULL_RETENTION,
    GROUPS,
    QUICK,
    QUICK_ON_SGLANG,
    Case,
    Cell,
    KvPlan,
    cases_of,
)
from loadtest.kv_rows import COLUMNS, KvRun, row
from loadtest.kv_run import KvSearches, options_of
from loadtest.kv_sglang import ON_SGLANG, UNTOLD, cells_on_sglang, token_bytes
from loadtest.on_sglang import to_its_end
from loadtest.options import BenchmarkParser, at_least, planned
from loadtest.policy_events import event_us
from loadtest.report import publish, say, say_row
from loadtest.searches import Item, items_of
from loadtest.token_eviction.token_eviction_policies import TOKEN_EVICTION
from loadtest.token_eviction.token_policy_events import event_us as token_policy_event_us
from models.tasks import TASKS
from models.tasks.task import Split
from search.policies.registry import POLICIES


async def measure(
    plan: KvPlan, moments: dict[str, list[Moment]] | None = None
) -> list[dict[str, Any]]:
    """All rows, case by case; ``moments`` takes the KV over time of the first question."""
    rows = []
    if plan.engine == "sglang":
        for case in cases_of(plan):
            cells = await cells_on_sglang(plan, case)
            rows += _rows(plan, case, cells, token_bytes(), lambda _: UNTOLD)
        return rows
    searches = KvSearches(plan, moments)
    worth = searches.models.options.value_params()
    events = {
        name: event_us(EXACT[name], worth=worth) if name in EXACT else token_policy_event_us(name)
        for name in dict.fromkeys((FULL_RETENTION, *plan.policies))
    }
    signals = {"signals": worth.theta.signals}
    size = sum(layer.nbytes for layer in searches.models.policy.new_store(1).both) // 2
    for case in cases_of(plan):
        cells = await _cells(plan, searches, case)
        rows += _rows(plan, case, cells, size, lambda policy: signals | events[policy])
    return rows


def _rows(
    plan: KvPlan,
    case: Case,
    cells: Mapping[Cell, Sequence[KvRun]],
    size: int,
    about: Callable[[str], dict[str, Any]],
) -> list[dict[str, Any]]:
    """A case's rows. ``size``: bytes of a token's KV; ``about`` a KV policy: what is known of it
    apart from the searches."""
    rows = []
    full = cells[FULL_RETENTION, 1.0]
    for (policy, rho), runs in cells.items():
        found = row(runs, full) | about(policy)
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
                "peak_kv_bytes": size * found["peak_kv_tokens"],
            }
            | found
        )
        say_row(rows[-1], COLUMNS)
    return rows


async def _cells(plan: KvPlan, searches: KvSearches, case: Case) -> dict[Cell, list[KvRun]]:
    """A search's runs by policy and rho, full retention's first."""
    cells: dict[Cell, list[KvRun]] = {(FULL_RETENTION, 1.0): []}
    for number, item in enumerate(items_of(case.task, plan.split, plan.questions, plan.seed)):
        found = await _one(plan, searches, case, item, backwards=number % 2 == 1)
        for cell, run in found.items():
            cells.setdefault(cell, []).append(run)
        say(f"{case.task} {case.search} {case.config}: {number + 1} of {plan.questions}")
    return cells


async def _one(
    plan: KvPlan, searches: KvSearches, case: Case, item: Item, *, backwards: bool
) -> dict[Cell, KvRun]:
    """One question at full retention, then by every policy in every budget."""
    reference = await searches.run(case, item, FULL_RETENTION, 1.0, None)
    cells: list[Cell] = [(policy, rho) for rho in plan.rhos for policy in plan.policies]
    whole: Cell = (FULL_RETENTION, 1.0)
    found = dict.fromkeys([whole, *cells], reference)
    for policy, rho in cells[::-1] if backwards else cells:
        if (policy, rho) != whole:
            found[policy, rho] = await searches.run(case, item, policy, rho, reference)
    return found


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    options = _parser().parse_args()
    plan = _plan(options)
    start = time.monotonic()
    moments: dict[str, list[Moment]] = {}
    rows = to_its_end(measure(plan, None if options.plot is None else moments))
    document = {
        "rows": rows,
        "engine": plan.engine,
        "threads": (plan.threads or os.cpu_count()) if plan.engine == "embedded" else None,
        "seconds": time.monotonic() - start,
    }
    publish(document, options.json, "ArborKV: KV budgets", COLUMNS)
    if options.plot is not None:
        draw(moments, options.plot)


def picture(text: str) -> Path:
    """A reader of a file's path that can be drawn to."""
    try:
        check_path(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "kv", __doc__, "quick", "keep", "seed", "threads", limit="questions of a task"
    )
    parser.add_argument("--plot", type=picture, help="draw figure 3 to this file")
    parser.add_argument(
        "--engine", choices=("embedded", "sglang"), default="embedded", help="what draws"
    )
    policies = (*EXACT, *TOKEN_EVICTION, *GROUPS, *ON_SGLANG)
    parser.by_commas("task", "tasks", TASKS)
    parser.by_commas("search", "searches", POLICIES, "search policies")
    parser.by_commas("config", "configs", CONFIGS)
    parser.by_commas("policy", "policies", dict.fromkeys(policies), "KV policies, groups too")
    parser.by_commas("rho", "rhos", float, "shares of full retention's peak")
    parser.by_commas("parallel", "parallel", int, "leaves expanded a round")
    parser.add_argument(
        "--active", action="store_true", help="no budget below what full retention reads at once"
    )
    parser.add_argument("--split", choices=get_args(Split), help="whose questions; default test")
    parser.add_argument("--expansions", type=at_least(1), help="in place of S and L's")
    parser.add_argument("--theta", type=Path, help="what arborkv values steps by")
    return parser


def _plan(options: argparse.Namespace) -> KvPlan:
    """The full or quick plan with what the options change; a wrong one ends the program."""
    plan, there = QUICK if options.quick else KvPlan(), (*EXACT, *TOKEN_EVICTION)
    if options.engine == "sglang":
        less = QUICK_ON_SGLANG if options.quick else {}
        plan, there = replace(plan, policies=ON_SGLANG, **less), ON_SGLANG
        _parser().embedded_alone(
            plot=options.plot,
            theta=options.theta,
            threads=options.threads,
            keep=options.kept_in,
            active=options.active or None,
        )
    plan = planned(plan, options)
    named = chain.from_iterable(GROUPS.get(name, (name,)) for name in plan.policies)
    plan = replace(plan, policies=list(dict.fromkeys(named)))
    for name in plan.policies:
        if name not in there:
            _parser().error(f"--policy {name}: known are {', '.join(there)}")
    try:
        options_of(plan)
    except ValueError as error:
        _parser().error(f"--theta: {error}")
    return plan


if __name__ == "__main__":
    main()
