"""What do FlashTTS's parts win? Its precise goodput, latency and ablation (figures 11 to 17).

`python -m loadtest.goodput [--quick] [--json]`. Every search is run by every variant of the engine,
in turns, forwards and backwards: `paper_baseline` (even pools, first come first served, prefixes
scored whole), `baseline` (our engine without the parts), `P` (siblings adjacent), `MP` (and the
roofline split, live), `SMP` (and speculative expansion with look-ahead verification). A cell is a
pair of models, a policy, a number of beams and a pool: a share of the KV bytes that both models
hold at most when there is room for all, though at least a path for each. Ratios are of pairs of one
item and repeat within one run; where `same_work` is 1, both did the same passes over the same
tokens and a ratio shows only what order and luck make of time. `rebase` is the paper's dynamic
branching, `steps` its varying granularity: beam search by steps of a fixed length. With `--clock
cpu` seconds are the processor's, for a machine with other work to do. `room_bound` is how much
faster the baseline is with room for everything: order and split cannot win more. `ahead_bound` is
what speculation could win where a pass costs the same however full: the bundled policy's steps are
nearly of one length, so it leaves little to win, unless it draws hotter (`--temperature 2`).

All cells take days: `--sample` draws some, and `--of` sums up what several runs wrote.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.budget_weight import spec_for
from loadtest.configs import STEP_TOKENS
from loadtest.goodput_embedded import VARIANTS, ModelPair
from loadtest.goodput_rows import (
    BASELINE,
    COLUMNS,
    SUMMARY_COLUMNS,
    GoodputRun,
    joined,
    rows,
    summary,
)
from loadtest.on_sglang import to_its_end
from loadtest.options import BenchmarkParser, at_least, planned
from loadtest.report import cell_text, publish, say_row
from loadtest.searches import items_of
from loadtest.turns import CLOCKS
from models.bundled import SPRIG_FOLDER
from models.deepen import deepen
from search.policies.registry import POLICIES
from search.spec import SearchSpec

PAIRS = {"equal": (1, 1), "generator-heavy": (4, 1), "verifier-heavy": (1, 4)}
"""Factors by which each pair multiplies the layers of the bundled policy and reward model."""
STEPS = "steps"
GRANULARITY = 32
"""Tokens per step of the policy ``steps``."""


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """What is measured: every variant in every cell. ``batch_limit``: places in a batch, few
    enough that a round's stragglers leave some idle, as in the papers. ``sample``: the number of
    cells to draw at random; 0 for all. No cell begins more than ``seconds`` after the start."""

    tasks: Sequence[str] = ("blocksworld", "wordproblem")
    policies: Sequence[str] = ("beam", "dvts", "rebase", "ets", STEPS)
    widths: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)
    pools: Sequence[float] = (0.25, 0.5, 1.0)
    pairs: Sequence[str] = tuple(PAIRS)
    variants: Sequence[str] = tuple(VARIANTS)
    batch_limit: int = 64
    questions: int = 16
    repeats: int = 1
    temperature: float = 1.0
    sample: int = 0
    seed: int = 0
    threads: int = 1
    clock: str = "wall"
    seconds: float = float("inf")


QUICK = GoodputPlan(
    tasks=("wordproblem",),
    policies=("beam",),
    widths=(8, 32),
    pools=(0.5,),
    pairs=("equal", "verifier-heavy"),
    questions=2,
    seconds=80.0,
)


@dataclass(frozen=True, slots=True)
class GoodputCell:
    """A search on a task's questions, in a pool, by a pair of models."""

    pair: str
    task: str
    policy: str
    width: int
    pool: float
    temperature: float = 1.0

    @property
    def spec(self) -> SearchSpec:
        """The spec of the cell's search."""
        policy = "beam" if self.policy == STEPS else self.policy
        base = spec_for(policy, self.width, self.task)
        longest: dict[str, Any] = {"max_step_tokens": STEP_TOKENS[self.task]}
        if self.policy == STEPS:
            longest = {"max_step_tokens": GRANULARITY, "step_tokens": GRANULARITY}
        sampling = {"temperature": self.temperature}
        return SearchSpec.model_validate(base.model_dump(exclude_unset=True) | longest | sampling)


def cells_of(plan: GoodputPlan) -> list[GoodputCell]:
    """The cells of the plan, pair by pair."""
    kinds = (plan.pairs, plan.tasks, plan.policies, plan.widths, plan.pools)
    cells = [GoodputCell(*kind, plan.temperature) for kind in itertools.product(*kinds)]
    numbers = range(len(cells))
    if 0 < plan.sample < len(cells):
        luck = random.Random(repr((plan.seed, kinds)))  # other widths or pairs, another sample
        numbers = sorted(luck.sample(numbers, plan.sample))
    return [cells[number] for number in numbers]


async def measure(plan: GoodputPlan, models: tuple[Path, Path]) -> dict[str, Any]:
    """Measure all cells; ``models``: checkpoints of the policy and of the reward model."""
    start, all_rows, skipped = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair, cells in itertools.groupby(cells_of(plan), lambda cell: cell.pair):
            if time.monotonic() - start > plan.seconds:
                skipped += [" ".join(map(cell_text, _name(cell).values())) for cell in cells]
                continue
            paths = _deepened(models, PAIRS[pair], Path(folder))
            bench = ModelPair(*paths, plan.batch_limit, plan.threads, CLOCKS[plan.clock])
            roomy_runs: dict[Any, list[GoodputRun]] = {}
            for cell in cells:
                if time.monotonic() - start > plan.seconds:
                    skipped.append(" ".join(map(cell_text, _name(cell).values())))
                else:
                    all_rows += await _cell(plan, bench, cell, roomy_runs)
    return {
        "rows": all_rows,
        "summary": summary(all_rows),
        "left_out": skipped,
        "clock": plan.clock,
        "temperature": plan.temperature,
        "batch_limit": plan.batch_limit,
        "seconds": time.monotonic() - start,
    }


async def _cell(
    plan: GoodputPlan, bench: ModelPair, cell: GoodputCell, roomy_runs: dict[Any, list[GoodputRun]]
) -> list[dict[str, Any]]:
    """Measure a cell's rows. ``roomy_runs``: runs with room for all, done once for all pools."""
    items = items_of(cell.task, "test", plan.questions, plan.seed)
    of = (cell.task, cell.policy, cell.width)
    if of not in roomy_runs:
        roomy_runs[of] = [
            await bench.run(VARIANTS[BASELINE], cell.spec, item, None, 0) for item in items
        ]
    whole = roomy_runs[of]
    path = max(run.path_tokens for run in whole)
    working_set = max(run.held_bytes for run in whole)
    budget = max(round(cell.pool * working_set), bench.pools.least_bytes(path))

    by_variant: dict[str, list[list[GoodputRun]]] = {
        name: [[] for _ in items] for name in plan.variants
    }
    for number, name in _turns(plan, len(items)):
        run = await bench.run(VARIANTS[name], cell.spec, items[number], budget, path)
        by_variant[name][number].append(run)
    runs = {
        name: [of_item[repeat] for repeat in range(plan.repeats) for of_item in by_item]
        for name, by_item in by_variant.items()
    }
    about = _name(cell) | {
        "seed": plan.seed,
        "working_set_bytes": working_set,
        "pool_bytes": budget,
        "batch_limit": plan.batch_limit,
    }
    cell_rows = [about | row for row in rows(runs, whole)]
    for row in cell_rows:
        say_row(row, COLUMNS)
    return cell_rows


def _turns(plan: GoodputPlan, items: int) -> Iterator[tuple[int, str]]:
    """Items and variants in the order they run: all variants of an item before the next, every
    other time backwards."""
    forwards = list(plan.variants)
    for number in range(items):
        for repeat in range(plan.repeats):
            order = forwards[::-1] if (number + repeat) % 2 else forwards
            yield from ((number, name) for name in order)


def _name(cell: GoodputCell) -> dict[str, Any]:
    return {
        "pair": cell.pair,
        "task": cell.task,
        "policy": cell.policy,
        "beams": cell.width,
        "pool": cell.pool,
    }


def _deepened(models: tuple[Path, Path], times: tuple[int, int], folder: Path) -> tuple[Path, Path]:
    """Checkpoints with ``times`` as many layers: they cost more and give the same outputs."""
    policy, prm = models
    return _times(policy, times[0], folder / "policy"), _times(prm, times[1], folder / "prm")


def _times(source: Path, more: int, path: Path) -> Path:
    """A checkpoint of ``more`` times the layers, at ``path`` unless it is the source itself."""
    if more == 1:
        return source
    if not path.is_dir():
        layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
        deepen(source, path, more * layers)
    return path


def main() -> None:
    """Print tables, or one JSON document with ``--json``."""
    options = _parser().parse_args()
    if options.of:
        _publish_summary(summary(joined(options.of)), options.json)
        return
    plan = planned(QUICK if options.quick else GoodputPlan(), options)
    document = to_its_end(measure(plan, (SPRIG_FOLDER / "policy", SPRIG_FOLDER / "prm")))
    publish(document, options.json, "FlashTTS: precise goodput", COLUMNS)
    if not options.json:
        _publish_summary(document["summary"], False)


def _publish_summary(means: list[dict[str, Any]], as_json: bool) -> None:
    publish({"rows": means}, as_json, "means over cells", SUMMARY_COLUMNS)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "goodput",
        __doc__,
        *("seed", "threads", "clock"),
        quick="four cells, two questions each",
        limit="questions a cell",
        repeats="of every search by every variant",
    )
    of = "no run: means over the cells in what --json wrote, each file some of them"
    parser.add_argument("--of", type=Path, nargs="+", metavar="FILE", help=of)
    parser.by_commas("policy", "policies", (*POLICIES, STEPS))
    parser.by_commas("task", "tasks", STEP_TOKENS)
    parser.by_commas("pair", "pairs", PAIRS)
    parser.by_commas("width", "widths", int, "beams")
    parser.by_commas("pool", "pools", float, "shares of the working set")
    parser.add_argument("--batch-limit", type=at_least(1), help="places in a batch")
    parser.add_argument("--sample", type=at_least(1), help="so many of the cells, at random")
    parser.add_argument(
        "--temperature", type=float, help="the bundled policy's steps are of one length at 1"
    )
    return parser


if __name__ == "__main__":
    main()
