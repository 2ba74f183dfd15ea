"""Rows of `loadtest.allocation`, from outcomes that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.allocation import DIALS, QUICK, items_of, records_of
from loadtest.allocation_plot import plot
from loadtest.allocation_rows import (
    AllocationCell,
    SearchRecord,
    cells_of,
    gains,
    holm,
    read_csv,
    rows_of,
    write_csv,
)
from loadtest.compare import compare
from loadtest.paired import loss_p
from loadtest.searches import Item, Method
from search.engine import EngineError
from search.spec import SearchSpec
from tests.search.scripted_engine import ScriptedEngine


def cell(
    name: str, width: int, right: Sequence[int], tokens: int, kv: int | None = None
) -> AllocationCell:
    """A cell with one search for each entry of ``right``, each of ``tokens`` tokens."""
    return AllocationCell(
        name,
        width,
        [
            SearchRecord("game24", f"q{i}", 0, name, width, r, r, 1 - r, tokens, kv)
            for i, r in enumerate(right)
        ],
    )


def test_rows_worked_by_hand() -> None:
    """Two questions, two seeds: (q1, q2) of the first seed, then of the second.

    best_of_n 4 has half of all right, rebase 4 three of four, at 60 of 100 tokens: 60 % of the
    tokens for its accuracy. rebase 2 has as many, at 30. ets 2 holds 8 where rebase 2 holds 12.
    """
    cells = [
        cell("best_of_n", 4, (1, 0, 1, 0), 100),
        cell("rebase", 2, (1, 0, 1, 0), 30, kv=12),
        cell("rebase", 4, (1, 1, 1, 0), 60, kv=20),
        cell("ets", 2, (0, 0, 1, 0), 30, kv=8),
    ]
    rows = rows_of("game24", cells, 2)
    assert [row["tokens_to_best_of_n"] for row in rows] == [1.0, 0.3, 0.3, None]
    assert [row["kv_saved"] for row in rows] == [None, 1.0, 1.0, 1.5]
    assert [row["sampler_diff"] for row in rows] == [0.0, 0.0, 0.25, -0.25]
    assert rows[2]["sampler_diff_ci95"] == [0.0, 0.5]
    assert [row["narrower_diff_ci95"] for row in rows] == [None, None, [0.0, 0.5], None]
    assert [row["hurts"] for row in rows] == [None, None, False, None]
    assert gains(cells[2], cells[0], 2) == [0.0, 0.5]
    assert (rows[2]["n"], rows[2]["accuracy"], rows[2]["illegal_replies"]) == (2, 0.75, 0.25)


def test_a_width_that_hurts_is_seen() -> None:
    """With all forty right at width 4 and half of them at 16, width 16 hurts."""
    cells = [cell("rebase", 4, [1] * 40, 30), cell("rebase", 16, [1, 0] * 20, 90)]
    assert [row["hurts"] for row in rows_of("game24", cells, 1)] == [None, True]


def test_searches_come_back_from_csv(tmp_path: Path) -> None:
    """All fields survive; a question that a method lacks with some seed is not counted."""
    searches = [
        SearchRecord("game24", question, seed, method, 4, 1, 1, None if seed else 0, 30, None)
        for question in ("a, b", 'c "d"')
        for seed in (0, 1)
        for method in ("rebase", "ets")
    ]
    write_csv(tmp_path / "all.csv.gz", searches)
    assert set(read_csv(tmp_path / "all.csv.gz")) == set(searches)
    cells, seeds = cells_of("game24", searches[:-1])
    assert seeds == 2
    assert [(c.method, [(s.question, s.seed) for s in c.searches]) for c in cells] == [
        ("ets", [("a, b", 0), ("a, b", 1)]),
        ("rebase", [("a, b", 0), ("a, b", 1)]),
    ]
    with pytest.raises(ValueError, match="game24: no question with all of"):
        cells_of("game24", searches[3:5])


def test_a_plot_has_a_panel_a_task(tmp_path: Path) -> None:
    """Each panel has the task's name and all methods; the same rows give the same bytes."""
    cells = [cell("best_of_n", 4, (1, 0), 100), cell("rebase", 4, (1, 1), 60)]
    rows = [row for task in ("game24", "countdown") for row in rows_of(task, cells, 1)]
    plots = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in plots:
        plot(rows, path)
    svg = plots[0].read_text()
    assert all(word in svg for word in ("game24, 2 questions", "countdown, 2", "rebase"))
    assert plots[1].read_text() == svg


@pytest.mark.parametrize(
    ("ps", "rejected"),
    [
        # .025/3 = .0083, .025/2 = .0125, .025
        ([0.008, 0.02, 0.012], [True, True, True]),
        ([0.008, 0.02, 0.013], [True, False, False]),
        ([0.02, None, 0.001], [True, None, True]),
        ([0.03, 0.02], [False, False]),
    ],
)
def test_holm_by_hand(ps: list[float | None], rejected: list[bool | None]) -> None:
    assert holm(ps) == rejected


def test_p_of_a_loss() -> None:
    """With losses alone p is the least possible value, with gains alone it is 1."""
    assert loss_p([-1.0] * 9) == 1e-4
    assert loss_p([1.0] * 9) == 1.0


def test_seeds_search_the_same_questions() -> None:
    """All questions with the first seed, then all with the second; each item's seed is unique."""
    items = items_of(replace(QUICK, questions=3, seeds=(0, 7)), "game24")
    assert [i.question for i in items[:3]] == [i.question for i in items[3:]]
    assert len({i.seed for i in items}) == 6


async def test_every_method_is_a_policy_that_searches() -> None:
    """Each method is a known policy that finishes on an engine without a model."""
    item = Item("game24", "Use 4 9 10 13 to make 24.", 1)
    methods = [Method(n, SearchSpec.model_validate({**d, "width": 4})) for n, d in DIALS.items()]
    comparison = await compare(ScriptedEngine(), [item], methods)
    searches = [record for results in comparison for record in records_of([item], results, [0])]
    assert [s.method for s in searches] == list(DIALS)
    assert all(s.tokens > 0 for s in searches)
    with pytest.raises(EngineError):
        await compare(ScriptedEngine(embeds=False), [item], methods)
