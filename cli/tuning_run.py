"""Runs ``hedgerow tune`` on engines started for it: progress, table and file."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.evaluation import shareable, side_by_side
from cli.grid_search import Grid, GridSearch
from cli.search_grid import possible
from cli.tuning import Rung, Tuning, rows_of, tune, tuned_file
from runtime.profiles import PROFILES
from search.engine import Capabilities
from server.assemble import RunningModel, running
from server.settings import Settings, SettingsError
from server.tuned import tuned_toml

COLUMNS = ("search", "accuracy (95 %)", "behind the best", "tokens", "seconds", "for")
NAME_FIELDS = ("policy", "width", "vote", "temperature")


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """A tuning of ``grid`` for ``budget`` tokens.

    ``data``: the questions' name in the file ``out``; ``rows_file``: where rows are kept;
    ``engines``: how many, 0: what suits the models. ``by_name``: the user has named the policies,
    so a search that the models cannot do is an error.
    """

    grid: Grid
    budget: int
    data: str
    out: Path
    rows_file: Path
    engines: int = 0
    by_name: bool = False


async def run_tuning(request: TuningRequest, settings: Settings, as_json: bool) -> dict[str, Any]:
    """Tune, write the file, print a table unless ``as_json``; return the report.

    Raises SettingsError for searches that the models cannot do and for too small a budget.
    """
    console, start = Console(stderr=True), time.monotonic()
    async with AsyncExitStack() as stack:
        contexts = [running(s) for s in side_by_side(settings, request.engines)]
        models = [await stack.enter_async_context(context) for context in contexts]
        grid = _grid(request, settings, models[0].engine.capabilities, console)
        tuned = await _tune(request, grid, models, console)
    today = datetime.datetime.now().astimezone().date()
    file = tuned_file(tuned, settings, request.data, today)
    request.out.write_text(tuned_toml(file), encoding="utf-8")
    report = {
        "data": request.data,
        "budget": request.budget,
        "tokens": round(tuned.tokens),
        "grid_tokens": round(tuned.grid_tokens),
        "seconds": time.monotonic() - start,
        "rungs": [_rung(rung) for rung in tuned.rungs],
        "rows": rows_of(tuned, grid.specs, len(grid.seeds)),
    }
    if not as_json:
        Console().print(_table(report))
        saving = 1 - tuned.tokens / tuned.grid_tokens
        print(
            f"{report['tokens']:,} tokens, {saving:.0%} less than the whole grid on "
            f"{tuned.last.questions} questions; written to {request.out}"
        )
    return report


async def _tune(
    request: TuningRequest, grid: Grid, models: Sequence[RunningModel], console: Console
) -> Tuning:
    """Tune, with progress on the console."""
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("searches", total=None)

        def show(rung: Rung) -> None:
            summary = _rung(rung)
            console.print(
                f"{rung.questions} questions: {summary['searches']} searches of {summary['trees']} "
                f"trees; {summary['kept_searches']} of {summary['kept_trees']} go on"
            )

        try:
            search = GridSearch(
                grid,
                [model.engine for model in models],
                models[0].text,
                request.rows_file,
                flops=models[0].flops,
                done=lambda: progress.advance(bar),
            )
            return await tune(search, grid, request.budget, show)
        except ValueError as error:
            raise SettingsError(str(error)) from None


def _grid(request: TuningRequest, settings: Settings, able: Capabilities, console: Console) -> Grid:
    """The part of the grid that the models can do. Raises SettingsError if that is nothing, or if
    policies that cannot be done were asked for by name."""
    specs, refusals = possible(request.grid.specs, settings, able)
    for name, why in refusals.items():
        if request.by_name or not specs:
            raise SettingsError(f"{name}: {why}")
    if refusals:
        console.print(f"left out: {'; '.join(f'{name}: {why}' for name, why in refusals.items())}")
    share = request.grid.share and shareable(settings)
    return replace(request.grid, specs=specs, share=share, profile=PROFILES[settings.profile])


def _rung(rung: Rung) -> dict[str, int]:
    return {
        "questions": rung.questions,
        "searches": len(rung.cells),
        "trees": rung.trees,
        "kept_searches": len(rung.kept),
        "kept_trees": rung.kept_trees,
    }


def _table(report: Mapping[str, Any]) -> Table:
    """A table of the Pareto front and the choices, the cheapest first; of equal votes on a tree
    only one is shown."""
    rows: dict[tuple[float, float], dict[str, Any]] = {}
    for row in report["rows"]:
        if row["front"] or row["chosen"]:
            place = row["tokens"], row["accuracy"]
            if row["chosen"] or place not in rows:
                rows[place] = row
    questions = report["rungs"][-1]["questions"]
    table = Table(*COLUMNS, title=f"{report['data']}, {questions} questions: the Pareto front")
    for _, row in sorted(rows.items()):
        table.add_row(
            name_of(row["search"]),
            f"{row['accuracy']:.1%} ({_percent(row['accuracy_ci95'])})",
            _percent(row["behind_best_ci95"] or ()),
            f"{row['tokens']:,.0f}",
            f"{row['seconds']:.2f}",
            ", ".join(row["chosen"]),
        )
    return table


def _percent(interval: Sequence[float]) -> str:
    return " to ".join(f"{end:.0%}" for end in interval)


def name_of(search: Mapping[str, Any]) -> str:
    """A short name of a search: policy, width, vote, temperature, and other fields that are set."""
    words = [
        f"{search['policy']} {search['width']}",
        search["vote"],
        f"T {search['temperature']:g}",
    ]
    return ", ".join([*words, *(f"{k} {v}" for k, v in search.items() if k not in NAME_FIELDS)])
