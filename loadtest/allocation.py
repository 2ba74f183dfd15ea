"""Which policy is worth its tokens: do trees beat plain samples, and does more width ever hurt?

`python -m loadtest.allocation [--quick] [--json] [--keep FILE]`. Every method and width on the same
questions and seeds: accuracy, tokens as in ``usage``, the paired difference to the better sampler
(`best_of_n`, `self_consistency`) at the largest width and to its own next smaller width, with 95 %
bootstrap intervals over questions; a question's seeds are averaged first. A step up that hurts is
one whose one-sided p, of a loss, stays below 0.025 after Holm's correction over all steps up of a
task. ``tokens_to_best_of_n``: what the cheapest width of a method that is at least as accurate as
`best_of_n` at the largest width costs, as a share of that one's tokens. Choose on `--split dev`;
with `--keep FILE` a run, which takes hours, goes on where an earlier one ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.evaluation import item_seed
from cli.intervals import clustered95
from loadtest.compare import Results, compare
from loadtest.on_sglang import to_its_end
from loadtest.options import BenchmarkParser, planned
from loadtest.paired import bootstrap95, loss_p
from loadtest.report import publish, say
from loadtest.searches import Engines, Item, Method
from loadtest.throughput import AMPLE_TOKENS, LEAST_POOL
from models.tasks import TASKS
from search.spec import SearchSpec

SAMPLERS = ("best_of_n", "self_consistency")
YARDSTICK = "best_of_n"
DIALS: Mapping[str, Mapping[str, Any]] = {
    "best_of_n": {"policy": "best_of_n"},
    "self_consistency": {"policy": "self_consistency"},
    "rebase": {"policy": "rebase"},
    "rebase lineages": {"policy": "rebase", "vote": "lineages"},
    "rebase mass .5": {"policy": "rebase", "mass": 0.5},
    "rebase mass .5 floor 3": {"policy": "rebase", "mass": 0.5, "floor_levels": 3},
    "rebase floor 3": {"policy": "rebase", "floor_levels": 3},
    "beam": {"policy": "beam"},
    "ets": {"policy": "ets"},
    "dora": {"policy": "dora"},
    "dora .1": {"policy": "dora", "similarity_temperature": 0.1},
    "particle_filter": {"policy": "particle_filter"},
    "particle_filter ess": {"policy": "particle_filter", "ess_threshold": 0.5},
    "particle_filter soft": {
        "policy": "particle_filter",
        "ess_threshold": 0.5,
        "soft_start": True,
        "max_depth": 14,
    },
    "adaptive": {"policy": "adaptive"},
    "adaptive .75": {"policy": "adaptive", "agreement": 0.75},
    "adaptive floor 3": {"policy": "adaptive", "floor_levels": 3},
}
"""The methods by name: what is asked for, width apart."""
SIDE_BY_SIDE = 4
LEVEL = 0.025
COLUMNS = (
    "task",
    "method",
    "width",
    "accuracy",
    "pass_at_n",
    "illegal_replies",
    "tokens",
    "tokens_to_best_of_n",
    "sampler_diff",
    "sampler_diff_ci95",
    "narrower_diff_ci95",
    "hurts",
)


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What is measured: questions of a split, each searched once a seed."""

    tasks: Sequence[str]
    methods: Sequence[str]
    widths: Sequence[int]
    split: str
    questions: int
    seeds: Sequence[int]
    kept_in: Path | None = None


FULL = AllocationPlan(tuple(TASKS), tuple(DIALS), (4, 16, 64), "dev", 400, (0, 1))
QUICK = AllocationPlan(("game24",), ("best_of_n", "rebase", "adaptive"), (4, 16), "dev", 4, (0,))


async def measure(plan: AllocationPlan) -> list[dict[str, Any]]:
    """All rows, task by task."""
    ample = AMPLE_TOKENS * max(plan.widths) * SIDE_BY_SIDE + LEAST_POOL
    methods = [
        Method(name, SearchSpec.model_validate({**DIALS[name], "width": width}))
        for name in plan.methods
        for width in plan.widths
    ]
    rows = []
    async with Engines(kv_tokens=ample, prm_kv_tokens=ample) as engine:
        for task in plan.tasks:
            items = items_of(plan, task)
            searched = await compare(
                engine, items, methods, at_once=SIDE_BY_SIDE, kept_in=plan.kept_in
            )
            rows += rows_of(task, searched, len(plan.seeds))
            say(f"{task}: {len(items)} searches of each of {len(methods)} methods and widths")
    return rows


def items_of(plan: AllocationPlan, task: str) -> list[Item]:
    """The questions, drawn by the first seed, once a seed: all of the first seed come first."""
    questions = TASKS[task].questions(plan.split, plan.questions, plan.seeds[0])  # type: ignore[arg-type]
    return [Item(task, q, item_seed(seed, q)) for seed in plan.seeds for q in questions]


def rows_of(task: str, searched: Sequence[Results], seeds: int) -> list[dict[str, Any]]:
    """A row for each method and width, in their order."""
    widest = max(results.method.spec.width for results in searched)
    at_most = [r for r in searched if r.method.spec.width == widest]
    samplers = [r for r in at_most if r.method.name in SAMPLERS]
    sampler = max(samplers, key=lambda results: results.accuracy, default=None)
    yardstick = next((r for r in at_most if r.method.name == YARDSTICK), None)
    rows = []
    for results in searched:
        n = len(results.correct) // seeds
        narrower = _narrower(results, searched)
        beside = None if sampler is None else gains(results, sampler, seeds)
        step_up = None if narrower is None else gains(results, narrower, seeds)
        rows.append(
            {
                "task": task,
                "method": results.method.name,
                "width": results.method.spec.width,
                "n": n,
                "seeds": seeds,
                "accuracy": results.accuracy,
                "accuracy_ci95": clustered95(results.correct, n),
                "pass_at_n": sum(r.any_correct for r in results.results) / len(results.results),
                "illegal_replies": illegal_replies(results),
                "tokens": tokens(results),
                "tokens_to_best_of_n": _share(results, searched, yardstick),
                "sampler": None if sampler is None else sampler.method.name,
                "sampler_diff": None if beside is None else sum(beside) / n,
                "sampler_diff_ci95": None if beside is None else bootstrap95(beside),
                "narrower_diff_ci95": None if step_up is None else bootstrap95(step_up),
                "narrower_p": None if step_up is None else loss_p(step_up),
                "tree_digest": results.digest,
            }
        )
    hurting = holm([row["narrower_p"] for row in rows])
    return [row | {"hurts": hurts} for row, hurts in zip(rows, hurting, strict=True)]


def tokens(results: Results) -> float:
    """Generated tokens a search, those of twins too."""
    return results.total(lambda stats: stats.generated_tokens) / len(results.results)


def illegal_replies(results: Results) -> float | None:
    """The share of chosen replies with a step that the rules forbid; None where there is none."""
    known = [result.illegal for result in results.results if result.illegal is not None]
    return sum(known) / len(known) if known else None


def gains(mine: Results, other: Results, seeds: int) -> list[float]:
    """What each question gains, as a mean over its seeds."""
    n = len(mine.correct) // seeds
    per_item = [float(a) - float(b) for a, b in zip(mine.correct, other.correct, strict=True)]
    return [sum(per_item[i::n]) / seeds for i in range(n)]


def holm(ps: Sequence[float | None], level: float = LEVEL) -> list[bool | None]:
    """Which hypotheses Holm's step-down procedure rejects; None where there is none to test."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    rejected: list[bool | None] = [None if p is None else False for p in ps]
    for rank, (p, i) in enumerate(order):
        if p > level / (len(order) - rank):
            break
        rejected[i] = True
    return rejected


def _narrower(results: Results, searched: Sequence[Results]) -> Results | None:
    """The same method at the next smaller width."""
    spec = results.method.spec
    less = [
        other
        for other in searched
        if other.method.name == results.method.name and other.method.spec.width < spec.width
    ]
    return max(less, key=lambda other: other.method.spec.width, default=None)


def _share(
    results: Results, searched: Sequence[Results], yardstick: Results | None
) -> float | None:
    """The tokens of the method's cheapest width that reaches the yardstick, as a share of its."""
    if yardstick is None:
        return None
    enough = [
        tokens(other)
        for other in searched
        if other.method.name == results.method.name and other.accuracy >= yardstick.accuracy
    ]
    return min(enough) / tokens(yardstick) if enough else None


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    options = _parser().parse_args()
    plan = planned(QUICK if options.quick else FULL, options)
    rows = to_its_end(measure(plan))
    publish({"rows": rows, "split": plan.split}, options.json, "allocation", COLUMNS)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser("allocation", __doc__, "quick", "limit", "keep")
    parser.by_commas("task", "tasks", TASKS)
    parser.by_commas("method", "methods", DIALS)
    parser.by_commas("width", "widths", int)
    parser.add_argument("--split", choices=("dev", "test"), help="whose questions")
    parser.add_argument("--seed", type=seeds, dest="seeds", help="by commas")
    return parser


def seeds(text: str) -> list[int]:
    """A reader of seeds, of which 0 is one."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
