"""``hedgerow tune``: finds searches that are worth their tokens on the user's models and tasks."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.grid_search import Grid, GridSearch
from cli.intervals import clustered95
from cli.successive_halving import (
    LEAST_QUESTIONS,
    Cell,
    first_questions,
    front,
    gain95,
    going_on,
    most_accurate,
    next_questions,
    tree_key,
    worth_it,
)
from search.spec import SearchSpec
from server.reward_settings import models_of
from server.settings import Settings
from server.tuned import TunedEffort, TunedSearch, TunedSearches

TIMED_QUESTIONS = 4
EFFORT_SHARES: Mapping[TunedEffort, float] = {"low": 1 / 16, "medium": 1 / 4, "high": math.inf}
"""The most that an effort costs, as a share of the dearest search: like widths 4, 16 and 64."""


@dataclass(frozen=True, slots=True)
class Rung:
    """The cells that were tried on ``questions`` questions, and those that were kept."""

    questions: int
    cells: Sequence[Cell]
    kept: Sequence[Cell]

    @property
    def trees(self) -> int:
        """The number of trees, each of which may have several cells, one for each vote."""
        return len(_by_tree(self.cells))

    @property
    def kept_trees(self) -> int:
        """The number of trees with a kept cell."""
        return len(_by_tree(self.kept))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The results. ``choices``: by name (``auto``, ``low``, ``medium``, ``high``); ``seconds``: of
    searches run alone, by tree; ``tokens``: of all rungs; ``grid_tokens``: of the full grid."""

    rungs: Sequence[Rung]
    choices: Mapping[str, Cell]
    seconds: Mapping[str, float]
    tokens: float
    grid_tokens: float

    @property
    def last(self) -> Rung:
        """The last rung, which decides the choices."""
        return self.rungs[-1]


async def tune(
    search: GridSearch, grid: Grid, budget: int, on_rung: Callable[[Rung], None] = lambda _: None
) -> Tuning:
    """Try the grid on a few questions, then what is kept of it on more, until the budget or the
    questions run out or one tree remains; then choose among the cells of the last rung.

    ``on_rung`` is called with every rung. Raises ValueError for a budget that is too small.
    """
    most, seeds, specs = len(grid.questions), len(grid.seeds), list(grid.specs)
    probe = await search.cells(specs, min(LEAST_QUESTIONS, most))
    questions = first_questions(budget, _cost(probe) * seeds, most)
    rungs: list[Rung] = []
    while True:
        cells = await search.cells(specs, questions)
        remaining = budget - tokens_of([*rungs, Rung(questions, cells, cells)]) * seeds
        future_searches = (most - questions) * seeds
        survivors = going_on(cells, remaining / future_searches if future_searches else math.inf)
        rungs.append(Rung(questions, cells, survivors))
        on_rung(rungs[-1])
        specs = [cell.spec for cell in survivors]
        more = next_questions(questions, remaining, _cost(survivors) * seeds, most)
        if more == questions or rungs[-1].kept_trees == 1:
            break
        questions = more
    choices = chosen(rungs)
    seconds = await search.seconds_alone(
        [cell.spec for cell in (*front(cells), *choices.values())], TIMED_QUESTIONS
    )
    grid_tokens = _cost([cell for rung in rungs for cell in rung.cells]) * questions * seeds
    return Tuning(rungs, choices, seconds, tokens_of(rungs) * seeds, grid_tokens)


def chosen(rungs: Sequence[Rung]) -> dict[str, Cell]:
    """The search for policy ``auto``, and one for each effort: the most accurate that costs at most
    the effort's share of the dearest search of the grid."""
    cells = rungs[-1].cells
    dearest = max(_by_tree([cell for rung in rungs for cell in rung.cells]).values())
    efforts = {name: most_accurate(cells, share * dearest) for name, share in EFFORT_SHARES.items()}
    return {"auto": worth_it(cells), **efforts}


def tokens_of(rungs: Sequence[Rung]) -> float:
    """The tokens of all rungs, for one seed."""
    last = {key: rung.questions for rung in rungs for key in _by_tree(rung.cells)}
    means = _by_tree([cell for rung in rungs for cell in rung.cells])
    return sum(means[key] * questions for key, questions in last.items())


def _by_tree(cells: Sequence[Cell]) -> dict[str, float]:
    """The mean tokens of a search, by tree; of several cells of a tree the last one counts."""
    return {tree_key(cell.spec): cell.tokens for cell in cells}


def _cost(cells: Sequence[Cell]) -> float:
    """The tokens that one question takes on all trees of the cells together."""
    return sum(_by_tree(cells).values())


def rows_of(tuned: Tuning, specs: Sequence[SearchSpec], seeds: int) -> list[dict[str, Any]]:
    """A row for each search of the grid, in order, with its results of the last rung it was in."""
    latest = {
        cell.spec.model_dump_json(): (rung, cell) for rung in tuned.rungs for cell in rung.cells
    }
    best, on_front = most_accurate(tuned.last.cells), front(tuned.last.cells)
    rows = []
    for rung, cell in (latest[spec.model_dump_json()] for spec in specs):
        last = rung is tuned.last
        rows.append(
            {
                "search": fields_of(cell.spec),
                "questions": rung.questions,
                "seeds": seeds,
                "accuracy": cell.accuracy,
                "accuracy_ci95": clustered95(cell.right, cell.questions),
                "tokens": cell.tokens,
                "seconds": tuned.seconds.get(tree_key(cell.spec)) if last else None,
                "behind_best_ci95": list(gain95(best, cell)) if last and cell is not best else None,
                "last_rung": last,
                "front": last and cell in on_front,
                "chosen": [name for name, choice in tuned.choices.items() if choice is cell],
            }
        )
    return rows


def fields_of(spec: SearchSpec) -> dict[str, Any]:
    """The fields that a search sets, without its seed."""
    return spec.model_dump(exclude_unset=True, exclude_none=True, exclude={"seed"})


def tuned_file(tuned: Tuning, settings: Settings, data: str, today: datetime.date) -> TunedSearches:
    """The content of the file that ``hedgerow serve --tuned`` reads."""
    searches = {
        name: TunedSearch(
            search=fields_of(cell.spec),  # type: ignore[arg-type]
            accuracy=round(cell.accuracy, 4),
            accuracy_ci95=[round(end, 4) for end in clustered95(cell.right, cell.questions)],
            tokens=round(cell.tokens, 1),
            seconds=round(tuned.seconds[tree_key(cell.spec)], 3),
            questions=cell.questions,
        )
        for name, cell in tuned.choices.items()
    }
    return TunedSearches(
        date=today,
        data=data,
        **models_of(settings),
        auto=searches["auto"],
        reasoning_effort={name: searches[name] for name in EFFORT_SHARES},
    )
