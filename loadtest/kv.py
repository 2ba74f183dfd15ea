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
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from loadtest.policy_events import event_us
from loadtest.report import publish, say, shown
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
        say("  ".join(f"{name} {shown(rows[-1][name])}" for name in COLUMNS))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.kv", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="few questions, minutes")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--plot", type=Path, help="draw figure 3 to this file")
    parser.add_argument(
        "--engine", choices=("embedded", "sglang"), default="embedded", help="what draws"
    )
    parser.add_argument("--task", help="tasks, separated by commas")
    parser.add_argument("--search", help="search policies, separated by commas")
    parser.add_argument("--config", help="S, L or both, separated by commas")
    parser.add_argument(
        "--policy", help="KV policies, separated by commas; paper and ablations stand for several"
    )
    parser.add_argument("--rho", help="shares of full retention's peak, separated by commas")
    parser.add_argument(
        "--active",
        action="store_true",
        default=None,
        help="no budget below what full retention reads at once",
    )
    parser.add_argument("--parallel", help="leaves expanded a round, separated by commas")
    parser.add_argument("--limit", type=int, help="questions of a task")
    parser.add_argument("--split", choices=get_args(Split), help="whose questions; default test")
    parser.add_argument("--keep", type=Path, help="take searches from this file and add to it")
    parser.add_argument("--expansions", type=int, help="nodes expanded, in place of S and L's")
    parser.add_argument("--seed", type=int, help="of questions and searches")
    parser.add_argument("--theta", type=Path, help="what arborkv values steps by")
    parser.add_argument("--threads", type=int, help="of the arithmetic; 0: one a core")
    return parser


def _plan(options: argparse.Namespace) -> KvPlan:
    """The full or quick plan with what the options change; a wrong one ends the program."""
    plan = replace(QUICK if options.quick else KvPlan(), engine=options.engine)
    policies = (*EXACT, *TOKEN_EVICTION, *GROUPS)
    if options.engine == "sglang":
        less = QUICK_ON_SGLANG if options.quick else {}
        plan, policies = replace(plan, policies=ON_SGLANG, **less), ON_SGLANG
        _refuse_on_sglang(options)
    changes: dict[str, Any] = {}
    for field, name, kind, known in (
        ("tasks", "task", str, TASKS),
        ("searches", "search", str, POLICIES),
        ("configs", "config", str, CONFIGS),
        ("policies", "policy", str, policies),
        ("rhos", "rho", float, None),
        ("parallel", "parallel", int, None),
    ):
        given = getattr(options, name)
        if given is not None:
            changes[field] = _list(name, given, kind, known)
    if "policies" in changes:
        named = [GROUPS.get(name, (name,)) for name in changes["policies"]]
        changes["policies"] = list(dict.fromkeys(name for names in named for name in names))
    for field, name, least in (
        ("questions", "limit", 1),
        ("expansions", "expansions", 1),
        ("seed", "seed", 0),
        ("threads", "threads", 0),
    ):
        given = getattr(options, name)
        if given is not None and given < least:
            sys.exit(f"loadtest.kv: --{name} {given}: must be at least {least}")
        if given is not None:
            changes[field] = given
    if options.split is not None:
        changes["split"] = options.split
    _check_files(options)
    plan = replace(
        plan, **changes, active=bool(options.active), theta=options.theta, kept_in=options.keep
    )
    try:
        options_of(plan)
    except ValueError as error:
        sys.exit(f"loadtest.kv: --theta: {error}")
    return plan


def _check_files(options: argparse.Namespace) -> None:
    """A file that cannot be written ends the program."""
    if options.plot is not None:
        try:
            check_path(options.plot)
        except ValueError as error:
            sys.exit(f"loadtest.kv: {error}")
    if options.keep is not None and not options.keep.parent.is_dir():
        sys.exit(f"loadtest.kv: --keep {options.keep}: there is no folder {options.keep.parent}")


def _refuse_on_sglang(options: argparse.Namespace) -> None:
    """What is the embedded engine's alone ends the program."""
    for name in ("plot", "theta", "threads", "keep", "active"):
        given = getattr(options, name)
        if given is not None:
            sys.exit(f"loadtest.kv: --{name} {given}: the embedded engine's alone")


def _list(name: str, given: str, kind: type, known: Any) -> list[Any]:
    """The values of an option; a wrong one ends the program."""
    try:
        values = list(dict.fromkeys(kind(part.strip()) for part in given.split(",")))
    except ValueError:
        sys.exit(f"loadtest.kv: --{name} {given}: must be numbers, separated by commas")
    for value in values:
        if known is not None and value not in known:
            sys.exit(f"loadtest.kv: --{name} {value}: known are {', '.join(known)}")
        if known is None and not 0 < value < math.inf:
            sys.exit(f"loadtest.kv: --{name} {given}: must be one or more values above 0")
    return values


if __name__ == "__main__":
    main()
