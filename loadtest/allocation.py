"""Which policy is worth its tokens: do trees beat plain samples, and does more width ever hurt?

`python -m loadtest.allocation [--quick] [--json] [--keep FILE]`. Every method and width on the same
questions and seeds: accuracy, tokens as in ``usage``, the paired difference to the better sampler
(`best_of_n`, `self_consistency`) at the largest width and to its own next smaller width, with 95 %
bootstrap intervals over questions; a question's seeds are averaged first. A step up that hurts is
one whose one-sided p, of a loss, stays below 0.025 after Holm's correction over all steps up of a
task. ``tokens_to_best_of_n``: what the cheapest width of a method that is at least as accurate as
`best_of_n` at the largest width costs, as a share of that one's tokens. Choose on `--split dev`;
with `--keep FILE` a run, which takes hours, goes on where an earlier one ended. `--write CSV` saves
each search's outcome, `--read CSV` makes the rows from that file; `--plot FILE` draws them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.evaluation import item_seed
from loadtest.allocation_plot import plot
from loadtest.allocation_rows import SearchRecord, cells_of, read_csv, rows_of, write_csv
from loadtest.compare import Results, compare
from loadtest.on_sglang import to_its_end
from loadtest.options import BenchmarkParser, output_file, planned
from loadtest.report import publish
from loadtest.searches import Item, Method, embedded
from loadtest.throughput import roomy
from models.tasks import TASKS
from search.spec import SearchSpec

DIALS: Mapping[str, Mapping[str, Any]] = {
    "best_of_n": {"policy": "best_of_n"},
    "self_consistency": {"policy": "self_consistency"},
    "rebase": {"policy": "rebase"},
    "rebase lineages": {"policy": "rebase", "vote": "lineages"},
    "rebase mass .5": {"policy": "rebase", "mass": 0.5},
    "rebase mass .5 floor 3": {"policy": "rebase", "mass": 0.5, "floor_levels": 3},
    "rebase floor 3": {"policy": "rebase", "floor_levels": 3},
    "rebase restarts": {"policy": "rebase", "restarts": 4},
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
    "adaptive without restarts": {"policy": "adaptive", "restarts": 0},
    "adaptive .75": {"policy": "adaptive", "agreement": 0.75},
    "adaptive floor 3": {"policy": "adaptive", "floor_levels": 3},
}
"""The methods by name: the fields of their search specs, except the width."""
SIDE_BY_SIDE = 4
COLUMNS = (
    "task",
    "method",
    "width",
    "accuracy",
    "pass_at_n",
    "illegal_replies",
    "tokens",
    "tokens_to_best_of_n",
    "kv_saved",
    "sampler_diff",
    "sampler_diff_ci95",
    "narrower_diff_ci95",
    "hurts",
)


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What is measured: questions of a split, each searched once per seed."""

    tasks: Sequence[str]
    methods: Sequence[str]
    widths: Sequence[int]
    split: str
    questions: int
    seeds: Sequence[int]
    kept_in: Path | None = None


FULL = AllocationPlan(tuple(TASKS), tuple(DIALS), (4, 16, 64), "dev", 400, (0, 1))
QUICK = AllocationPlan(("game24",), ("best_of_n", "rebase", "adaptive"), (4, 16), "dev", 4, (0,))


async def measure(plan: AllocationPlan) -> list[SearchRecord]:
    """Run every search of the plan, task by task."""
    methods = [
        Method(name, SearchSpec.model_validate({**DIALS[name], "width": width}))
        for name in plan.methods
        for width in plan.widths
    ]
    searches = []
    async with roomy(embedded, max(plan.widths) * SIDE_BY_SIDE, 0) as engine:
        for task in plan.tasks:
            items = items_of(plan, task)
            by_method = await compare(
                engine, items, methods, at_once=SIDE_BY_SIDE, kept_in=plan.kept_in
            )
            searches += [r for results in by_method for r in records_of(items, results, plan.seeds)]
    return searches


def items_of(plan: AllocationPlan, task: str) -> list[Item]:
    """The questions, chosen by the first seed and repeated for each seed, grouped by seed."""
    questions = TASKS[task].questions(plan.split, plan.questions, plan.seeds[0])  # type: ignore[arg-type]
    return [Item(task, q, item_seed(seed, q)) for seed in plan.seeds for q in questions]


def records_of(items: Sequence[Item], results: Results, seeds: Sequence[int]) -> list[SearchRecord]:
    """A record of each of a method's searches, in the items' order."""
    method, n = results.method, len(items) // len(seeds)
    return [
        SearchRecord(
            item.task,
            item.question,
            seeds[i // n],
            method.name,
            method.spec.width,
            int(result.correct),
            int(result.any_correct),
            None if result.illegal is None else int(result.illegal),
            result.stats.generated_tokens,
            result.stats.kv_tokens_total,
        )
        for i, (item, result) in enumerate(zip(items, results.results, strict=True))
    ]


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = _parser()
    options = parser.parse_args()
    plan = planned(QUICK if options.quick else FULL, options)
    searches = read_records(options) if options.read else to_its_end(measure(plan))
    if options.write:
        write_csv(options.write, searches)
    tasks = dict.fromkeys(search.task for search in searches)
    try:
        cells = {task: cells_of(task, searches) for task in tasks}
    except ValueError as error:
        parser.error(str(error))
    rows = [row for task in tasks for row in rows_of(task, *cells[task])]
    if options.plot:
        plot(rows, options.plot)
    publish({"rows": rows}, options.json, "allocation", COLUMNS)


def read_records(options: Namespace) -> list[SearchRecord]:
    """The records of the ``--read`` file that match the chosen tasks, methods and widths."""
    return [
        search
        for search in read_csv(options.read)
        if (options.tasks is None or search.task in options.tasks)
        and (options.methods is None or search.method in options.methods)
        and (options.widths is None or search.width in options.widths)
    ]


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser("allocation", __doc__, "quick", "limit", "keep")
    parser.by_commas("task", "tasks", TASKS)
    parser.by_commas("method", "methods", DIALS)
    parser.by_commas("width", "widths", int)
    parser.add_argument("--split", choices=("dev", "test"), help="whose questions")
    parser.add_argument("--seed", type=seeds, dest="seeds", help="by commas")
    parser.add_argument(
        "--read",
        type=Path,
        metavar="CSV",
        help="count these recorded searches instead of running any",
    )
    parser.add_argument(
        "--write", type=output_file, metavar="CSV", help="the searches, packed by gzip"
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="accuracy against tokens")
    return parser


def seeds(text: str) -> list[int]:
    """Parse seeds separated by commas; 0 is allowed."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
