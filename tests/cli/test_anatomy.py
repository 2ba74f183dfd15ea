"""``hedgerow eval``'s anatomy: rows checked by hand, and the plot."""

from __future__ import annotations

from pathlib import Path

from cli.anatomy import TreeAnatomy, anatomy_of, anatomy_table, together
from cli.anatomy_plot import plot
from cli.custom_dataset import CustomDataset
from cli.evaluation import evaluate
from search.anatomy import JudgedStep
from search.engine import Branch
from search.spec import SearchSpec
from tests.cli.test_evaluation import evaluation, number_of
from tests.search.scripted_engine import ScriptedEngine, decode, grow
from tests.server.conftest import PlainText


def test_two_trees_worked_by_hand() -> None:
    """The first tree ends at depth 1; there it keeps its 3 lineages: (3+2)/2, then (3+1)/2.

    AUC at depth 1: .9 > .5 and .4 < .5 give one half; at depth 2 no step is wrong.
    """
    first = TreeAnatomy(2, 40, (3,), (JudgedStep(1, 0.9, True), JudgedStep(1, 0.5, False)), True)
    second = TreeAnatomy(5, 60, (2, 1), (JudgedStep(1, 0.4, True), JudgedStep(2, 0.4, True)), False)
    assert together([first, second], 0.25, 0.75) == {
        "coverage_loss": 0.25,
        "selection_loss": 0.5,
        "distinct_replies": 3.5,
        "lineages_by_depth": [2.5, 2.0],
        "auc_by_depth": [0.5, None],
        "judged_steps": 4,
        "illegal_replies": 0.5,
        "distinct_tokens": 100,
    }


def test_nothing_known_is_none() -> None:
    """Without a checker of steps AUC and legality are None; without trees no loss is counted."""
    anatomy = together([TreeAnatomy(1, 4, (1,), (), None)], 1.0, 1.0)
    assert (anatomy["auc_by_depth"], anatomy["illegal_replies"]) == ([], None)
    assert together([], 0.0, 0.0)["coverage_loss"] == 0.0


def cheating(branch: Branch) -> str:
    """Break a rule in the first step of every second question; all answers are right."""
    text = decode(branch.tokens)
    if number_of(branch) % 2 and "bad" not in text:
        return "bad\n\n"
    return f"The answer is {number_of(branch)}."


async def test_rows_say_what_was_lost_and_who_cheated() -> None:
    """All replies are right, so nothing is lost; half are illegal; four twins are one reply."""
    rows = await evaluate(evaluation((4,)), [ScriptedEngine(cheating)], PlainText())
    for row in rows:
        anatomy = row["anatomy"]
        assert (anatomy["coverage_loss"], anatomy["selection_loss"]) == (0.0, 0.0)
        assert anatomy["illegal_replies"] == 0.5
        assert anatomy["distinct_replies"] == 1.0
        assert anatomy["lineages_by_depth"] == [1.0, 1.0]
        assert row["generated_tokens"] == 4 * anatomy["distinct_tokens"]


async def test_what_is_found_and_not_chosen_is_a_selection_loss() -> None:
    """The first child is right but scored 0; its siblings agree on a wrong answer."""

    def say(branch: Branch) -> str:
        return f"The answer is {number_of(branch) if branch.child == 0 else 99}."

    engine = ScriptedEngine(say=say, score_of=lambda texts: 0.9 if "99" in texts[-1] else 0.0)
    rows = await evaluate(evaluation((4,)), [engine], PlainText())
    assert [row["anatomy"]["selection_loss"] for row in rows] == [1.0, 1.0]
    assert rows[1]["anatomy"]["auc_by_depth"] == [0.0]


async def test_a_file_of_questions_has_no_checker_of_steps() -> None:
    """A file of questions and answers can check neither steps nor legality."""
    outcome = await grow(ScriptedEngine(), SearchSpec(policy="rebase", width=4, seed=1))
    anatomy = anatomy_of(CustomDataset("mine", {"Q": "2"}), "Q", outcome)
    assert (anatomy.steps, anatomy.illegal) == ((), None)
    assert anatomy.lineages[0] >= 1


async def test_table_and_plot_are_drawn(tmp_path: Path) -> None:
    """The table has a line for each row; equal rows give byte-equal plots."""
    rows = await evaluate(evaluation(), [ScriptedEngine(cheating)], PlainText())
    assert anatomy_table(rows).row_count == 4
    for name in ("a.svg", "b.svg"):
        plot(rows, tmp_path / name)
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text()
    assert ">rebase 4</text>" in picture
