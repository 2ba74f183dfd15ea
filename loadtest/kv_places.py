"""How long do searches take that share a pool of KV which full retention fills with two of them?

`python -m loadtest.kv_places [--quick] [--json]`. Table 5 of ArborKV's paper: where everything is
kept, memory decides how many searches may run at once, and the others wait. All questions are asked
at once on an engine whose pool is twice what the largest of the searches holds at full retention:
`full` runs two at once, which is what fits for certain; `arborkv` two as well, then as many as find
a quarter of that KV each. Ways take turns, forwards and backwards; `seconds` is the mean time from
asking to the answer, waiting included, `latency_vs_full` the median ratio over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from loadtest.kv_plan import FULL_RETENTION, ROOMY, Case, KvPlan, cases_of
from loadtest.listed import listed
from loadtest.report import publish, say, shown
from loadtest.searches import SPRIG, Engines, Item, Method, grow, items_of, side_by_side
from loadtest.turns import in_turns
from models.tasks import TASKS
from runtime.embedded.choices import KvPolicy
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.text import Text
from search.outcome import Outcome
from search.tree import combined_digest

FIT = 2
"""Searches that the pool holds whole."""
RHO = 0.25
"""What each search is given of its KV where as many run as can."""
COLUMNS = (
    *("task", "search", "kv_policy", "at_once", "n", "pool_tokens", "seconds", "latency_vs_full"),
    *("problems_per_second", "rehydrations", "identical_trees"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """A KV policy and how many searches run at once."""

    kv_policy: KvPolicy
    at_once: int


WAYS = (
    Placement(FULL_RETENTION, FIT),
    Placement("arborkv", FIT),
    Placement("arborkv", round(FIT / RHO)),
)


@dataclass(frozen=True, slots=True)
class TimedOutcomes:
    """What one way made of all questions: seconds of each from asking, and its outcome."""

    seconds: list[float]
    outcomes: list[Outcome]


async def answered(
    engine: EmbeddedEngine, case: Case, items: Sequence[Item], at_once: int
) -> TimedOutcomes:
    """Ask everything at once; so many run at a time, in order."""
    text, method = Text(SPRIG.policy), Method(case.search, case.spec)
    start = time.perf_counter()

    async def one(item: Item) -> tuple[float, Outcome]:
        outcome = await grow(engine, text, item, method)
        return time.perf_counter() - start, outcome

    found = await side_by_side(one, items, at_once)
    return TimedOutcomes([seconds for seconds, _ in found], [outcome for _, outcome in found])


async def measure(
    tasks: Sequence[str], searches: Sequence[str], questions: int, repeats: int, threads: int
) -> list[dict[str, Any]]:
    """Rows, task by task and search by search."""
    plan = KvPlan(tasks=tasks, searches=searches, configs=("S",), parallel=(1,))
    rows = []
    for case in cases_of(plan):
        rows += await _case(case, items_of(case.task, "test", questions, 0), repeats, threads)
    return rows


async def _case(
    case: Case, items: Sequence[Item], repeats: int, threads: int
) -> list[dict[str, Any]]:
    roomy = ROOMY * FIT
    async with Engines(kv_tokens=roomy, prm_kv_tokens=roomy, threads=threads) as engine:
        whole = (await answered(engine, case, items, FIT)).outcomes
    pool = FIT * max(outcome.stats.engine.kv_tokens_peak for outcome in whole)
    found: dict[Placement, list[TimedOutcomes]] = {way: [] for way in WAYS}

    async def run(way: Placement) -> None:
        rooms = {"kv_tokens": pool, "prm_kv_tokens": roomy, "threads": threads}
        async with Engines(**rooms, kv_policy=way.kv_policy) as engine:
            found[way].append(await answered(engine, case, items, way.at_once))

    await in_turns({way: lambda way=way: run(way) for way in WAYS}, repeats)
    rows = [row_of(case, way, found, pool, whole) for way in WAYS]
    for row in rows:
        say("  ".join(f"{name} {shown(row[name])}" for name in COLUMNS))
    return rows


def row_of(
    case: Case,
    way: Placement,
    found: dict[Placement, list[TimedOutcomes]],
    pool: int,
    whole: Sequence[Outcome],
) -> dict[str, Any]:
    """A way's row: means over questions and repeats, and the ratio to the first way."""
    mine, first = found[way], found[WAYS[0]]
    pairs = zip(mine, first, strict=True)
    ratios = [mean(a.seconds) / mean(b.seconds) for a, b in pairs]
    outcomes = mine[0].outcomes
    same = [a.digest == b.digest for a, b in zip(outcomes, whole, strict=True)]
    return {
        "task": case.task,
        "search": case.search,
        "kv_policy": way.kv_policy,
        "at_once": way.at_once,
        "n": len(outcomes),
        "repeats": len(mine),
        "pool_tokens": pool,
        "seconds": mean(second for each in mine for second in each.seconds),
        "latency_vs_full": median(ratios),
        "problems_per_second": len(outcomes) / mean(max(each.seconds) for each in mine),
        "rehydrations": mean(outcome.stats.engine.rehydrations for outcome in outcomes),
        "identical_trees": sum(same) / len(same),
        "tree_digest": combined_digest(outcome.digest for outcome in outcomes),
    }


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four questions, once")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    tasks, searches = ["blocksworld", "wordproblem"], ["best_first", "mcts"]
    parser.add_argument("--task", type=listed(str, TASKS), default=tasks, help="by commas")
    parser.add_argument("--search", type=listed(str, searches), default=searches, help="by commas")
    parser.add_argument("--limit", type=int, help="questions asked at once")
    parser.add_argument("--repeats", type=int, help="of every way")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: the fastest")
    options = parser.parse_args()
    questions = options.limit or (4 if options.quick else 16)
    repeats = options.repeats or (1 if options.quick else 3)
    rows = asyncio.run(measure(options.task, options.search, questions, repeats, options.threads))
    publish({"rows": rows}, options.json, "ArborKV, table 5: a pool for two", COLUMNS)


if __name__ == "__main__":
    main()
