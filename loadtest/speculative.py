"""What does speculative decoding save in tree search? SEED's tables, and what they leave out.

`python -m loadtest.speculative [--quick] [--json]`. Breadth-first Tree of Thoughts, the policy
judging its own thoughts, decoded one branch at a time or in batches, with a draft serially or
scheduled, with one or several candidates, by either rule of acceptance. All ways take turns on each
question, so each speedup is a median over pairs of one question within one run. Targets of any
cost are the bundled policy with layers that cost and say nothing. Creative Writing, a task of the
paper's, has no stand-in among ours and is left out.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.drafting import EVALUATOR, GENERATOR, DraftedEngine, Part
from loadtest.engine import Decoding
from loadtest.in_process import Clocked
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say_row
from loadtest.searches import Item, Method, grow, items_of
from loadtest.turns import CLOCKS
from models.bundled import SPRIG_FOLDER
from models.deepen import deepen
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from search.spec import PolicyName, SearchSpec
from search.tree import combined_digest

TASKS = ("game24", "blocksworld", "wordproblem")
DEPTHS = {"game24": 4, "blocksworld": 7, "wordproblem": 6}
ONE, MANY = (1, 1, 1), (2, 2, 1)
AR_SERIAL, AR_BATCHED = "ar_serial", "ar_batched"
STEP_TOKENS = 64
COLUMNS = (
    *("mode", "rule", "k_config", "verify_batch", "cost_ratio", "task", "part", "policy"),
    *("temperature", "thoughts", "tokens_per_second", "speedup_vs_ar_serial"),
    *("speedup_vs_ar_batched", "acceptance", "target_idle_share"),
)
QUICK_DEPTH = 2
QUICK_SECONDS = 150.0
"""After this long the quick run begins no further cell unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to decode. ``k_config`` empty: as far ahead as pays, the automatic mode."""

    mode: str
    rule: str = "coupled"
    k_config: tuple[int, ...] = ()
    verify_batch: int = 0

    def options(self, target: Path, threads: int) -> EngineOptions:
        """The engine options of this way."""
        plain = self.mode in (AR_SERIAL, AR_BATCHED)
        scheduled = "scheduled" if self.mode.endswith("_scheduled") else "serial"
        return EngineOptions(
            policy=target,
            draft="off" if plain else scheduled,
            draft_model=SPRIG_FOLDER / "draft",
            draft_tokens=len(self.k_config),
            k_config=self.k_config if max(self.k_config, default=1) > 1 else (),
            verify_batch=self.verify_batch,
            batch_limit=1 if self.mode == AR_SERIAL else 64,
            kv_tokens=8_192,
            threads=threads,
        )


PLAIN = (Kind(AR_SERIAL), Kind(AR_BATCHED))
DRAFTED = tuple(
    Kind(mode, rule, k_config)
    for rule in ("coupled", "leviathan")
    for mode, k_config in (
        ("sd", ONE),
        ("sd_scheduled", ONE),
        ("mcsd", MANY),
        ("mcsd_scheduled", MANY),
    )
)
AUTOMATIC = Kind("sd_scheduled")
PAPERS = Kind("sd_scheduled", "coupled", ONE, 1)
SHORT = (*PLAIN, *DRAFTED[:2], AUTOMATIC)


@dataclass(frozen=True, slots=True)
class SpeculativeCell:
    """A comparison: the ``kinds`` on one task, to a ``depth`` in steps. ``thoughts``: what
    ``tot_bfs`` chooses among, or the width of another policy."""

    cost_ratio: float
    task: str
    temperature: float
    thoughts: int
    kinds: tuple[Kind, ...]
    depth: int
    policy: PolicyName = "tot_bfs"

    @property
    def spec(self) -> SearchSpec:
        """The spec of the search."""
        spec = SearchSpec(
            policy=self.policy,
            width=self.thoughts,
            temperature=self.temperature,
            max_depth=self.depth,
            max_step_tokens=STEP_TOKENS,
        )
        papers = {"branch": self.thoughts, "breadth": 1}
        return spec.model_copy(update=papers) if self.policy == "tot_bfs" else spec


def quick_cells() -> list[SpeculativeCell]:
    """All ways on every task at ratio 10 and 3 thoughts; then other thoughts and ratios."""
    everything = (*PLAIN, *DRAFTED, AUTOMATIC, PAPERS)
    cells = [SpeculativeCell(10.0, task, 1.0, 3, everything, QUICK_DEPTH) for task in TASKS]
    cells += [
        SpeculativeCell(10.0, "game24", 1.0, n, (*SHORT, PAPERS), QUICK_DEPTH) for n in (8, 1)
    ]
    cells += [
        SpeculativeCell(ratio, "blocksworld", 1.0, 3, SHORT, QUICK_DEPTH) for ratio in (30.0, 5.0)
    ]
    cells += [SpeculativeCell(10.0, task, 0.2, 3, SHORT, QUICK_DEPTH) for task in TASKS]
    return cells + never_slower(QUICK_DEPTH)


def never_slower(depth: int | None = None) -> list[SpeculativeCell]:
    """The automatic mode where drafts can hardly win: the bundled policy itself, and many branches
    at once. ``depth``: in steps; None: the task's own."""
    kinds = (*PLAIN, AUTOMATIC)
    cells = [SpeculativeCell(1.0, task, 1.0, 3, kinds, depth or DEPTHS[task]) for task in TASKS]
    return cells + [
        SpeculativeCell(ratio, task, 1.0, 16, kinds, depth or DEPTHS[task], "rebase")
        for ratio in (1.0, 10.0)
        for task in TASKS
    ]


def full_cells() -> list[SpeculativeCell]:
    """Every ratio, task, temperature and way at 3 thoughts; 1 to 8 thoughts and V from 1 to 4."""
    everything = (*PLAIN, *DRAFTED, AUTOMATIC, PAPERS)
    cells = [
        SpeculativeCell(ratio, task, temperature, 3, everything, DEPTHS[task])
        for ratio, task, temperature in itertools.product((5.0, 10.0, 30.0), TASKS, (0.2, 1.0))
    ]
    batches = tuple(replace(PAPERS, verify_batch=v) for v in (1, 2, 4))
    kinds = (*PLAIN, *DRAFTED[:4], *batches, AUTOMATIC)
    cells += [
        SpeculativeCell(10.0, task, 1.0, n, kinds, DEPTHS[task])
        for task in TASKS
        for n in (1, 2, 4, 5, 6, 7, 8)
    ]
    return cells + never_slower()


class Targets:
    """The bundled policy, deepened until one decoded token costs ``ratio`` drafted ones."""

    def __init__(self, folder: Path, threads: int, clock: Callable[[], float]) -> None:
        self._folder, self._threads, self._clock = folder, threads, clock
        self._loaded: dict[float, Clocked] = {}
        self._draft = self._step_seconds(SPRIG_FOLDER / "draft")
        base = ModelConfig.from_checkpoint(SPRIG_FOLDER / "policy").layers
        times = [self._step_seconds(self._deepened(base * i)) for i in (1, 4)]
        self._base, self._first, self._each = base, times[0], (times[1] - times[0]) / (3 * base)

    def __getitem__(self, ratio: float) -> Clocked:
        """The target of a cost ratio; no smaller than the policy itself."""
        if ratio not in self._loaded:
            more = round((ratio * self._draft - self._first) / self._each)
            path = self._deepened(self._base + max(0, more))
            self._loaded[ratio] = Clocked(Forward(path, threads=self._threads), self._clock)
        return self._loaded[ratio]

    def path(self, ratio: float) -> Path:
        """The target's checkpoint."""
        return self._folder / str(self[ratio].forward.config.layers)

    def _deepened(self, layers: int) -> Path:
        path = self._folder / str(layers)
        if not path.is_dir():
            deepen(SPRIG_FOLDER / "policy", path, layers)
        return path

    def _step_seconds(self, checkpoint: Path) -> float:
        """Processor time of one decoded token of one sequence, the least of 30."""
        decoding = Decoding(Forward(checkpoint, threads=self._threads), 1)
        seconds = []
        for _ in range(30):
            start = time.process_time()
            decoding.step()
            seconds.append(time.process_time() - start)
        return min(seconds)


@dataclass(slots=True)
class SpeculativeRun:
    """A way's search of one question."""

    digest: str
    parts: dict[str, Part]


async def measure_cell(
    cell: SpeculativeCell, targets: Targets, limit: int, threads: int
) -> list[dict]:
    """The rows of a cell, for the generator and for the evaluator."""
    target, path = targets[cell.cost_ratio], targets.path(cell.cost_ratio)
    ways = {
        kind: DraftedEngine(target, kind.options(path, threads), rejects=kind.rule == "leviathan")
        for kind in cell.kinds
    }
    runs: dict[Kind, list[SpeculativeRun]] = {kind: [] for kind in cell.kinds}
    for number, item in enumerate(items_of(cell.task, "dev", limit, 0)):
        order = list(cell.kinds)[:: 1 if number % 2 == 0 else -1]
        for kind in order:
            runs[kind].append(await _run_question(ways[kind], item, cell.spec))
    rows = []
    for kind, part in itertools.product(cell.kinds, (GENERATOR, EVALUATOR)):
        rows.append(row_of(cell, kind, part, runs, target.forward.config.layers))
        say_row(rows[-1], COLUMNS)
    return rows


async def _run_question(way: DraftedEngine, item: Item, spec: SearchSpec) -> SpeculativeRun:
    way.start()
    outcome = await grow(way, item, Method(spec.policy, spec))
    return SpeculativeRun(outcome.digest, way.parts)


def row_of(
    cell: SpeculativeCell,
    kind: Kind,
    part: str,
    runs: dict[Kind, list[SpeculativeRun]],
    layers: int,
) -> dict[str, Any]:
    """One row: sums over the questions, speedups as medians over pairs of one question."""
    mine = [run.parts[part] for run in runs[kind]]
    total = {name: sum(p.counts[name] for p in mine) for name in ("tokens", "passes", "tested")}
    accepted, seconds = sum(p.counts["accepted"] for p in mine), sum(p.seconds for p in mine)
    digests = [run.digest for run in runs[kind]]
    return {
        "mode": kind.mode,
        "rule": kind.rule,
        "k_config": list(kind.k_config) or None,
        "verify_batch": kind.verify_batch,
        "cost_ratio": cell.cost_ratio,
        "target_layers": layers,
        "task": cell.task,
        "part": part,
        "policy": cell.policy,
        "temperature": cell.temperature,
        "thoughts": cell.thoughts,
        "n": len(mine),
        "tokens": total["tokens"],
        "tokens_per_second": total["tokens"] / seconds,
        **{
            f"speedup_vs_{name}": _speedup(mine, name, part, runs)
            for name in (AR_SERIAL, AR_BATCHED)
        },
        "acceptance": accepted / total["tested"] if total["tested"] else None,
        "tokens_per_target_pass": total["tokens"] / max(1, total["passes"]),
        "target_idle_share": 1 - sum(p.busy for p in mine) / seconds,
        "same_trees": digests == [run.digest for run in runs[PLAIN[0]]],
        "tree_digest": combined_digest(digests),
    }


def _speedup(
    mine: Sequence[Part], mode: str, part: str, runs: dict[Kind, list[SpeculativeRun]]
) -> float:
    theirs = next(runs[kind] for kind in runs if kind.mode == mode)
    pairs = zip(mine, (run.parts[part] for run in theirs), strict=True)
    return statistics.median(a.rate / b.rate for a, b in pairs)


async def measure(
    cells: Sequence[SpeculativeCell], limit: int, threads: int, seconds: float, clock: str = "wall"
) -> dict[str, Any]:
    """Measure the cells; none begins later than ``seconds``. ``clock``: one of CLOCKS."""
    start, rows, skipped = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as folder:
        targets = Targets(Path(folder), threads, CLOCKS[clock])
        for cell in cells:
            if time.perf_counter() - start > seconds:
                skipped.append(f"{cell.task}, ratio {cell.cost_ratio:g}, {cell.thoughts} thoughts")
                continue
            rows += await measure_cell(cell, targets, limit, threads)
    return {"rows": rows, "left_out": skipped, "clock": clock}


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = BenchmarkParser(
        "speculative",
        __doc__,
        *("seconds", "clock", "threads"),
        quick="fewer cells, one question each",
        limit="questions a cell",
    )
    parser.set_defaults(threads=1, clock="wall")
    parser.add_argument("--task", choices=TASKS, help="this task only")
    options = parser.parse_args()
    cells = quick_cells() if options.quick else full_cells()
    cells = [cell for cell in cells if options.task in (None, cell.task)]
    questions = options.questions or (1 if options.quick else 12)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else float("inf"))
    document = asyncio.run(measure(cells, questions, options.threads, seconds, options.clock))
    publish(document, options.json, "Speculative decoding in tree search", COLUMNS)


if __name__ == "__main__":
    main()
