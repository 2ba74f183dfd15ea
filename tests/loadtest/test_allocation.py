"""Rows of `loadtest.allocation`, from outcomes that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadtest.allocation import DIALS, QUICK, gains, holm, items_of, rows_of
from loadtest.compare import Results, compare
from loadtest.kept import Result
from loadtest.paired import loss_p
from loadtest.searches import Item, Method
from search.engine import EngineError
from search.spec import SearchSpec
from search.stats import SearchStats
from tests.search.scripted_engine import ScriptedEngine


async def stats() -> SearchStats:
    """Those of some search."""
    method = Method("rebase", SearchSpec(policy="rebase", width=2))
    item = Item("game24", "Use 4 9 10 13 to make 24.", 1)
    (results,) = await compare(ScriptedEngine(), [item], [method])
    return results.results[0].stats


async def made(name: str, width: int, right: Sequence[int], tokens: int) -> Results:
    """Outcomes of questions, right or not, at so many tokens each."""
    cost = replace(await stats(), generated_tokens=tokens)
    method = Method(name, SearchSpec.model_validate({**DIALS[name], "width": width}))
    return Results(method, [Result(bool(r), bool(r), not r, cost, "00", ()) for r in right])


async def test_rows_worked_by_hand() -> None:
    """Two questions, two seeds: (q1, q2) of the first seed, then of the second.

    best_of_n 4 has half of all right, rebase 4 three of four, at 60 of 100 tokens: 60 % of the
    tokens for its accuracy. rebase 2 has as many, at 30.
    """
    searched = [
        await made("best_of_n", 4, (1, 0, 1, 0), 100),
        await made("rebase", 2, (1, 0, 1, 0), 30),
        await made("rebase", 4, (1, 1, 1, 0), 60),
    ]
    rows = rows_of("game24", searched, 2)
    assert [row["tokens_to_best_of_n"] for row in rows] == [1.0, 0.3, 0.3]
    assert [row["sampler_diff"] for row in rows] == [0.0, 0.0, 0.25]
    assert rows[2]["sampler_diff_ci95"] == [0.0, 0.5]
    assert [row["narrower_diff_ci95"] for row in rows] == [None, None, [0.0, 0.5]]
    assert [row["hurts"] for row in rows] == [None, None, False]
    assert gains(searched[2], searched[0], 2) == [0.0, 0.5]
    assert (rows[2]["n"], rows[2]["accuracy"], rows[2]["illegal_replies"]) == (2, 0.75, 0.25)


async def test_a_width_that_hurts_is_seen() -> None:
    """All forty right at 4, half of them at 16."""
    searched = [
        await made("rebase", 4, [1] * 40, 30),
        await made("rebase", 16, [1, 0] * 20, 90),
    ]
    assert [row["hurts"] for row in rows_of("game24", searched, 1)] == [None, True]


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
    """Losses alone: the least there is; gains alone: 1."""
    assert loss_p([-1.0] * 9) == 1e-4
    assert loss_p([1.0] * 9) == 1.0


def test_seeds_search_the_same_questions() -> None:
    """All of the first seed, then all of the second, each search with a seed of its own."""
    items = items_of(replace(QUICK, questions=3, seeds=(0, 7)), "game24")
    assert [i.question for i in items[:3]] == [i.question for i in items[3:]]
    assert len({i.seed for i in items}) == 6


async def test_every_method_is_a_policy_that_searches() -> None:
    """Each is known, and finishes on an engine without a model."""
    item = Item("game24", "Use 4 9 10 13 to make 24.", 1)
    methods = [Method(n, SearchSpec.model_validate({**d, "width": 4})) for n, d in DIALS.items()]
    searched = await compare(ScriptedEngine(), [item], methods)
    assert len(rows_of("game24", searched, 1)) == len(DIALS)
    with pytest.raises(EngineError):
        await compare(ScriptedEngine(embeds=False), [item], methods)
