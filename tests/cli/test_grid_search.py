"""A grid's trees: all votes use one tree, and rows that are kept are not searched again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from cli.custom_dataset import CustomDataset
from cli.grid_search import Grid, GridQuestion, GridSearch
from cli.successive_halving import Cell, tree_key
from search.engine import EngineDown
from search.spec import PolicyName, SearchSpec, VoteName
from tests.cli.test_evaluation import Echo, number_of
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import PlainText

VOTES = get_args(VoteName)


def spec(policy: str, width: int = 4, **fields: Any) -> SearchSpec:
    """Return one search of the grid."""
    return SearchSpec.model_validate({"policy": policy, "width": width, **fields})


def grid(specs: list[SearchSpec], count: int = 3, **options: Any) -> Grid:
    """Return a grid whose questions are numbers to repeat."""
    questions = [GridQuestion(Echo(), text) for text in Echo().questions("dev", count)]
    return Grid(specs, questions, **{"seeds": (0,), "at_once": 2} | options)


async def cells(
    search_grid: Grid, engine: ScriptedEngine, count: int = 3, path: Path | None = None
) -> list[Cell]:
    """Return the cells of all specs on the first ``count`` questions."""
    return await GridSearch(search_grid, [engine], PlainText(), path).cells(
        search_grid.specs, count
    )


@pytest.mark.promise(
    "Votes that share one tree give the correctness and token count of a separate search for each "
    "vote."
)
@pytest.mark.parametrize("policy", get_args(PolicyName))
async def test_votes_on_one_tree_are_those_of_searches_of_their_own(policy: str) -> None:
    """Correctness and tokens are the same for every policy."""
    specs = [spec(policy, vote=vote) for vote in VOTES if policy != "self_consistency"]
    specs = specs or [spec(policy)]
    together = await cells(grid(specs, 6), ScriptedEngine(), 6)
    assert len({tree_key(s) for s in specs}) == 1
    for vote_cell, vote_spec in zip(together, specs, strict=True):
        (alone,) = await cells(grid([vote_spec], 6), ScriptedEngine(), 6)
        assert (vote_cell.right, vote_cell.tokens) == (alone.right, alone.tokens)


async def test_votes_cost_one_tree() -> None:
    """Seven votes draw no more than one vote."""
    single, seven = ScriptedEngine(), ScriptedEngine()
    await cells(grid([spec("rebase")]), single)
    await cells(grid([spec("rebase", vote=vote) for vote in VOTES]), seven)
    assert seven.expanded == single.expanded


async def test_right_by_hand() -> None:
    """Even numbers are repeated rightly: three questions and two seeds, seed by seed."""
    engine = ScriptedEngine(say=lambda b: f"The answer is {number_of(b) // 2 * 2}.")
    (cell,) = await cells(grid([spec("rebase")], seeds=(0, 7)), engine)
    assert cell.right == (True, False, True) * 2
    assert cell.tokens == 4 * len("The answer is 0.\0")


@pytest.mark.parametrize("broken_at", [0, 1, 5, 9])
async def test_what_was_done_before_a_failure_is_not_searched_again(
    tmp_path: Path, broken_at: int
) -> None:
    """The rows equal those of an undisturbed run, and the two runs together cost as much."""
    specs = [spec("rebase"), spec("best_of_n"), spec("self_consistency", 2)]
    whole = ScriptedEngine()
    path, search_grid = tmp_path / "kept.jsonl", grid(specs, at_once=1, share=False)
    expected = await cells(search_grid, whole)
    broken, after = ScriptedEngine(fail_at=broken_at), ScriptedEngine()
    with pytest.raises(EngineDown):
        await cells(search_grid, broken, path=path)
    kept_rows = path.read_text().count("\n") if path.exists() else 0
    assert await cells(search_grid, after, path=path) == expected
    assert len(after.released) == 9 - kept_rows
    assert await cells(search_grid, ScriptedEngine(fail_at=0), path=path) == expected


async def test_rows_of_other_votes_seeds_and_questions_are_searched(tmp_path: Path) -> None:
    """A kept row is not taken for a different search."""
    path = tmp_path / "kept.jsonl"
    await cells(grid([spec("rebase")]), ScriptedEngine(), 2, path)
    for other_grid, count in (
        (grid([spec("rebase", vote="majority")]), 2),
        (grid([spec("rebase")], seeds=(1,)), 2),
        (grid([spec("rebase", temperature=0.5)]), 2),
        (grid([spec("rebase")]), 3),
    ):
        engine = ScriptedEngine()
        await cells(other_grid, engine, count, path)
        assert engine.expanded


async def test_rows_of_other_answers_are_searched(tmp_path: Path) -> None:
    """After an answer in the file is corrected, the row for the wrong one is not reused."""
    engine = ScriptedEngine(say=lambda b: "The answer is 7.")
    path = tmp_path / "kept.jsonl"
    for answer, right in (("8", False), ("7", True), ("8", False)):
        task = CustomDataset("numbers", {"?": answer})
        search_grid = Grid([spec("rebase")], [GridQuestion(task, "?")], (0,))
        (cell,) = await cells(search_grid, engine, 1, path)
        assert cell.right == (right,)
    assert len(engine.released) == 2


async def test_sharing_and_engines_change_no_cell() -> None:
    """Draws that trees have in common are made once, by whichever engine."""
    specs = [spec("best_of_n", 8), spec("best_of_n", 4), spec("rebase", 4)]
    apart, shared = ScriptedEngine(say=babble), ScriptedEngine(say=babble)
    alone = await cells(grid(specs, share=False), apart)
    assert await cells(grid(specs), shared) == alone
    assert sum(map(len, shared.expanded)) < sum(map(len, apart.expanded))
    search = GridSearch(grid(specs), [ScriptedEngine(), ScriptedEngine()], PlainText())
    assert await search.cells(specs, 3) == alone


async def test_seconds_are_of_searches_alone(tmp_path: Path) -> None:
    """Each tree and question is timed in a search of its own, and the time is kept too."""
    specs = [spec("rebase"), spec("rebase", vote="majority"), spec("beam")]
    path, engine = tmp_path / "kept.jsonl", ScriptedEngine()
    search = GridSearch(grid(specs), [engine], PlainText(), path)
    seconds = await search.seconds_alone(specs, 2)
    assert list(seconds) == [tree_key(specs[0]), tree_key(specs[2])]
    assert len(engine.released) == 4
    rerun = GridSearch(grid(specs), [ScriptedEngine(fail_at=0)], PlainText(), path)
    assert await rerun.seconds_alone(specs, 2) == seconds
