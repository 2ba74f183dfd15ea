"""Rows of ``loadtest.allocation`` from its search records, and the CSV file of those records."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from cli.intervals import clustered95
from loadtest.paired import bootstrap95, loss_p

SAMPLERS = ("best_of_n", "self_consistency")
YARDSTICK = "best_of_n"
KV_YARDSTICK = "rebase"
LEVEL = 0.025


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """The outcome of one search of a question: a line of the CSV.

    ``illegal``: whether the chosen reply has a step that the rules forbid, None without a reply.
    ``kv``: tokens held, summed over rounds (``SearchStats.kv_tokens_total``), None if not kept.
    """

    task: str
    question: str
    seed: int
    method: str
    width: int
    right: int
    any_right: int
    illegal: int | None
    tokens: int
    kv: int | None


COLUMNS = [field.name for field in fields(SearchRecord)]
WORDS = ("task", "question", "method")
NUMBERS = [name for name in COLUMNS if name not in WORDS]


@dataclass(frozen=True, slots=True)
class AllocationCell:
    """A method and width: its searches, seed by seed, each seed with the same questions."""

    method: str
    width: int
    searches: Sequence[SearchRecord]

    @property
    def accuracy(self) -> float:
        """The share of right replies."""
        return sum(s.right for s in self.searches) / len(self.searches)

    @property
    def tokens(self) -> float:
        """Generated tokens per search, including those of identical steps."""
        return sum(s.tokens for s in self.searches) / len(self.searches)

    @property
    def illegal_replies(self) -> float | None:
        """The share of chosen replies with a step that the rules forbid; None without a reply."""
        flags = [s.illegal for s in self.searches if s.illegal is not None]
        return sum(flags) / len(flags) if flags else None


def rows_of(task: str, cells: Sequence[AllocationCell], seeds: int) -> list[dict[str, Any]]:
    """A row for each method and width, in their order."""
    widest = max(cell.width for cell in cells)
    at_most = [cell for cell in cells if cell.width == widest]
    samplers = [cell for cell in at_most if cell.method in SAMPLERS]
    sampler = max(samplers, key=lambda cell: cell.accuracy, default=None)
    yardstick = next((cell for cell in at_most if cell.method == YARDSTICK), None)
    rows = []
    for cell in cells:
        n = len(cell.searches) // seeds
        narrower = _narrower(cell, cells)
        beside = None if sampler is None else gains(cell, sampler, seeds)
        equal = None if yardstick is None else gains(cell, yardstick, seeds)
        step_up = None if narrower is None else gains(cell, narrower, seeds)
        rows.append(
            {
                "task": task,
                "method": cell.method,
                "width": cell.width,
                "n": n,
                "seeds": seeds,
                "accuracy": cell.accuracy,
                "accuracy_ci95": clustered95([bool(s.right) for s in cell.searches], n),
                "pass_at_n": sum(s.any_right for s in cell.searches) / len(cell.searches),
                "illegal_replies": cell.illegal_replies,
                "tokens": cell.tokens,
                "tokens_to_best_of_n": _share(cell.method, cells, yardstick),
                "kv_saved": _kv_saved(cell, cells),
                "sampler": None if sampler is None else sampler.method,
                "sampler_diff": None if beside is None else sum(beside) / n,
                "sampler_diff_ci95": None if beside is None else bootstrap95(beside),
                "best_of_n_diff_ci95": None if equal is None else bootstrap95(equal),
                "narrower_diff_ci95": None if step_up is None else bootstrap95(step_up),
                "narrower_p": None if step_up is None else loss_p(step_up),
            }
        )
    hurting = holm([row["narrower_p"] for row in rows])
    return [row | {"hurts": hurts} for row, hurts in zip(rows, hurting, strict=True)]


def gains(mine: AllocationCell, other: AllocationCell, seeds: int) -> list[float]:
    """The accuracy that ``mine`` gains over ``other`` on each question, a mean over the seeds."""
    n = len(mine.searches) // seeds
    pairs = zip(mine.searches, other.searches, strict=True)
    per_item = [float(a.right - b.right) for a, b in pairs]
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


def write_csv(path: Path, searches: Iterable[SearchRecord]) -> None:
    """Write one line per search, sorted and gzipped: the same searches give the same bytes."""
    with (
        gzip.GzipFile(path, "wb", mtime=0) as packed,
        io.TextIOWrapper(packed, "utf-8", newline="") as text,
    ):
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows(sorted(astuple(search) for search in searches))


def read_csv(path: Path) -> list[SearchRecord]:
    """Read the records that ``write_csv`` wrote."""
    with gzip.open(path, "rt", newline="") as file:
        return [_record(row) for row in csv.DictReader(file)]


def cells_of(task: str, searches: Iterable[SearchRecord]) -> tuple[list[AllocationCell], int]:
    """A task's cells, and the number of seeds.

    Only questions that every method and width has searched with every seed are counted. Raises
    ValueError if there is none.
    """
    by_key = {(s.method, s.width, s.seed, s.question): s for s in searches if s.task == task}
    kinds = sorted({(method, width) for method, width, _, _ in by_key})
    seeds = sorted({seed for _, _, seed, _ in by_key})
    questions = [
        q
        for q in sorted({question for _, _, _, question in by_key})
        if all((*kind, seed, q) in by_key for kind in kinds for seed in seeds)
    ]
    if not questions:
        raise ValueError(f"{task}: no question with all of {kinds} and seeds {seeds}")
    cells = [
        AllocationCell(*kind, [by_key[*kind, seed, q] for seed in seeds for q in questions])
        for kind in kinds
    ]
    return cells, len(seeds)


def _record(line: dict[str, str]) -> SearchRecord:
    values: dict[str, Any] = {name: int(line[name]) if line[name] else None for name in NUMBERS}
    values |= {name: line[name] for name in WORDS}
    return SearchRecord(**values)


def _narrower(cell: AllocationCell, cells: Sequence[AllocationCell]) -> AllocationCell | None:
    """The same method at the next smaller width."""
    less = [c for c in cells if c.method == cell.method and c.width < cell.width]
    return max(less, key=lambda other: other.width, default=None)


def _share(
    method: str, cells: Sequence[AllocationCell], yardstick: AllocationCell | None
) -> float | None:
    """Tokens of the method's cheapest width that reaches the yardstick, over the yardstick's."""
    if yardstick is None:
        return None
    enough = [c.tokens for c in cells if c.method == method and c.accuracy >= yardstick.accuracy]
    return min(enough) / yardstick.tokens if enough else None


def _kv_saved(cell: AllocationCell, cells: Sequence[AllocationCell]) -> float | None:
    """The KV of ``rebase`` at this width over the cell's KV, from searches where both are known."""
    other = next((c for c in cells if (c.method, c.width) == (KV_YARDSTICK, cell.width)), None)
    if other is None:
        return None
    pairs = [
        (theirs.kv, mine.kv)
        for theirs, mine in zip(other.searches, cell.searches, strict=True)
        if theirs.kv is not None and mine.kv is not None
    ]
    return sum(k for k, _ in pairs) / sum(k for _, k in pairs) if pairs else None
