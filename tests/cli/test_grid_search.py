"""A grid's trees: votes are held on one tree, what is kept is not searched again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from cli.custom_dataset import CustomDataset
from cli.grid_search import Grid, GridQuestion, GridSearch
from cli.successive_halving import Cell, tree_key
from search.engine import EngineDown
from search.spec import PolicyName, SearchSpec, VoteName
from tests.cli.test_evaluation import Echo, asked
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import PlainText

VOTES = get_args(VoteName)


def spec(policy: str, width: int = 4, **more: Any) -> SearchSpec:
    """One of the grid."""
    return SearchSpec.model_validate({"policy": policy, "width": width, **more})


def grid(specs: list[SearchSpec], count: int = 3, **more: Any) -> Grid:
    """Numbers to repeat."""
    questions = [GridQuestion(Echo(), text) for text in Echo().questions("dev", count)]
    return Grid(specs, questions, **{"seeds": (0,), "at_once": 2} | more)


async def cells(
    wanted: Grid, engine: ScriptedEngine, count: int = 3, path: Path | None = None
) -> list[Cell]:
    """All of it on the first questions."""
    return await GridSearch(wanted, [engine], PlainText(), path).cells(wanted.specs, count)


@pytest.mark.promise("A vote changes no tree")
@pytest.mark.parametrize("policy", get_args(PolicyName))
async def test_votes_on_one_tree_are_those_of_searches_of_their_own(policy: str) -> None:
    """Right and wrong, and tokens, whatever the policy: a vote changes no tree."""
    specs = [spec(policy, vote=vote) for vote in VOTES if policy != "self_consistency"]
    specs = specs or [spec(policy)]
    together = await cells(grid(specs, 6), ScriptedEngine(), 6)
    assert len({tree_key(s) for s in specs}) == 1
    for one, own in zip(together, specs, strict=True):
        (alone,) = await cells(grid([own], 6), ScriptedEngine(), 6)
        assert (one.right, one.tokens) == (alone.right, alone.tokens)


async def test_votes_cost_one_tree() -> None:
    """Seven votes draw no more than one."""
    one, seven = ScriptedEngine(), ScriptedEngine()
    await cells(grid([spec("rebase")]), one)
    await cells(grid([spec("rebase", vote=vote) for vote in VOTES]), seven)
    assert seven.expanded == one.expanded


async def test_right_by_hand() -> None:
    """The even numbers are repeated: of three questions and two seeds, seed by seed."""
    engine = ScriptedEngine(say=lambda b: f"The answer is {asked(b) // 2 * 2}.")
    (cell,) = await cells(grid([spec("rebase")], seeds=(0, 7)), engine)
    assert cell.right == (True, False, True) * 2
    assert cell.tokens == 4 * len("The answer is 0.\0")


@pytest.mark.parametrize("broken_at", [0, 1, 5, 9])
async def test_what_was_done_before_a_failure_is_not_searched_again(
    tmp_path: Path, broken_at: int
) -> None:
    """The rows are those of a run that nothing happened to, and together they cost as much."""
    specs = [spec("rebase"), spec("best_of_n"), spec("self_consistency", 2)]
    whole = ScriptedEngine()
    path, wanted = tmp_path / "kept.jsonl", grid(specs, at_once=1, share=False)
    undisturbed = await cells(wanted, whole)
    broken, after = ScriptedEngine(fail_at=broken_at), ScriptedEngine()
    with pytest.raises(EngineDown):
        await cells(wanted, broken, path=path)
    done = path.read_text().count("\n") if path.exists() else 0
    assert await cells(wanted, after, path=path) == undisturbed
    assert len(after.released) == 9 - done
    assert await cells(wanted, ScriptedEngine(fail_at=0), path=path) == undisturbed


async def test_rows_of_other_votes_seeds_and_questions_are_searched(tmp_path: Path) -> None:
    """Nothing is taken for what it is not."""
    path = tmp_path / "kept.jsonl"
    await cells(grid([spec("rebase")]), ScriptedEngine(), 2, path)
    for other, count in (
        (grid([spec("rebase", vote="majority")]), 2),
        (grid([spec("rebase")], seeds=(1,)), 2),
        (grid([spec("rebase", temperature=0.5)]), 2),
        (grid([spec("rebase")]), 3),
    ):
        engine = ScriptedEngine()
        await cells(other, engine, count, path)
        assert engine.expanded


async def test_rows_of_other_answers_are_searched(tmp_path: Path) -> None:
    """Whoever mends an answer in his file is not told what the wrong one came to."""
    engine = ScriptedEngine(say=lambda b: "The answer is 7.")
    path = tmp_path / "kept.jsonl"
    for answer, right in (("8", False), ("7", True), ("8", False)):
        task = CustomDataset("numbers", {"?": answer})
        wanted = Grid([spec("rebase")], [GridQuestion(task, "?")], (0,))
        (cell,) = await cells(wanted, engine, 1, path)
        assert cell.right == (right,)
    assert len(engine.released) == 2


async def test_sharing_and_engines_change_no_cell() -> None:
    """What trees have in common is drawn once, by whichever engine."""
    specs = [spec("best_of_n", 8), spec("best_of_n", 4), spec("rebase", 4)]
    apart, shared = ScriptedEngine(say=babble), ScriptedEngine(say=babble)
    alone = await cells(grid(specs, share=False), apart)
    assert await cells(grid(specs), shared) == alone
    assert sum(map(len, shared.expanded)) < sum(map(len, apart.expanded))
    search = GridSearch(grid(specs), [ScriptedEngine(), ScriptedEngine()], PlainText())
    assert await search.cells(specs, 3) == alone


async def test_seconds_are_of_searches_alone(tmp_path: Path) -> None:
    """A search of its own for each tree and question, which is kept too."""
    specs = [spec("rebase"), spec("rebase", vote="majority"), spec("beam")]
    path, engine = tmp_path / "kept.jsonl", ScriptedEngine()
    timed = GridSearch(grid(specs), [engine], PlainText(), path)
    seconds = await timed.seconds_alone(specs, 2)
    assert list(seconds) == [tree_key(specs[0]), tree_key(specs[2])]
    assert len(engine.released) == 4
    again = GridSearch(grid(specs), [ScriptedEngine(fail_at=0)], PlainText(), path)
    assert await again.seconds_alone(specs, 2) == seconds
