"""``hedgerow tune``: rungs, choices and the file, on engines without a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cli.tuning_run
from cli.main import app
from cli.search_grid import USUAL_POLICIES, USUAL_VOTES, crossed, possible
from cli.successive_halving import Cell
from cli.tuning import Rung, chosen, tokens_of
from search.spec import SearchSpec
from server.assemble import RunningModel
from server.settings import Settings, load_settings
from server.tuned import read_tuned
from tests.cli.test_evaluation import number_of
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import PlainText

QUESTIONS = [{"question": str(i), "answer": i} for i in range(24)]


def spec(policy: str, width: int, vote: str = "majority", temperature: float = 1.0) -> SearchSpec:
    """Return a search of a grid."""
    fields = {"policy": policy, "width": width, "vote": vote, "temperature": temperature}
    return SearchSpec.model_validate(fields)


def cell(width: int, right: int, tokens: float, policy: str = "rebase") -> Cell:
    """Return a cell whose first ``right`` of four questions are right."""
    return Cell(spec(policy, width), tuple(i < right for i in range(4)), 4, tokens)


def test_choices_by_hand() -> None:
    """The dearest search of the grid takes 160 tokens, though it was dropped: low may cost 10,
    medium 40, high any number."""
    cells = [cell(1, 1, 8), cell(2, 2, 10), cell(4, 3, 40), cell(8, 4, 80)]
    rungs = [Rung(2, [*cells, cell(16, 0, 160)], cells), Rung(4, cells, cells)]
    widths = {name: choice.spec.width for name, choice in chosen(rungs).items()}
    assert {name: widths[name] for name in ("low", "medium", "high")} == {
        "low": 2,
        "medium": 4,
        "high": 8,
    }
    assert widths["auto"] == 4  # one of four behind: (1/6, error .22), two are too many (2/6, .25)


def test_the_help_names_the_usual_policies_and_votes() -> None:
    """The defaults of ``--policy`` and ``--vote``, in their order."""
    help_text = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["tune", "--help"]).stdout
    for names in (USUAL_POLICIES, USUAL_VOTES):
        assert f"default: {', '.join(names)}." in help_text


def test_the_highest_effort_has_no_limit() -> None:
    """The most accurate search may cost more on later questions than any did on the first."""
    last = [cell(2, 2, 10), cell(8, 4, 90)]
    choices = chosen([Rung(2, [cell(2, 2, 10), cell(8, 4, 80)], last), Rung(4, last, last)])
    assert choices["high"].spec.width == choices["auto"].spec.width == 8


def test_tokens_by_hand() -> None:
    """Ten tokens on two questions, then dropped; and fourteen on four, the first two included.
    Further votes on a tree cost nothing."""
    first = [cell(1, 1, 10.0), cell(2, 2, 12.0)]
    last = [
        Cell(spec("rebase", 2, vote), (True,) * 4, 4, 14.0) for vote in ("majority", "lineages")
    ]
    assert tokens_of([Rung(2, first, first[1:]), Rung(4, last, last)]) == 2 * 10 + 4 * 14


def test_a_grid_by_hand() -> None:
    """Chains take one vote, and width 1 too; other policies get width 1 only without chains."""

    def make(policy: str, width: int, vote: str, temperature: float) -> SearchSpec:
        return spec(policy, width, vote, temperature)

    specs = crossed(["self_consistency", "rebase"], [4, 1], ["majority", "best_last"], [1.0], make)
    assert [(s.policy, s.width, s.vote) for s in specs] == [
        ("self_consistency", 1, "majority"),
        ("self_consistency", 4, "majority"),
        ("rebase", 4, "majority"),
        ("rebase", 4, "best_last"),
    ]
    assert [s.width for s in crossed(["rebase"], [4, 1], ["majority"], [1.0], make)] == [1, 4]


@pytest.mark.parametrize(
    ("changes", "engine", "remaining"),
    [
        ({}, {}, ["self_consistency", "best_of_n", "rebase", "dora"]),
        ({}, {"embeds": False}, ["self_consistency", "best_of_n", "rebase"]),
        ({}, {"outcome": True}, ["self_consistency", "best_of_n"]),
        ({"reward_model": None}, {}, ["self_consistency"]),
        ({}, {"scores": False}, ["self_consistency"]),
        (
            {"reward_model": None, "verifier": "arithmetic"},
            {},
            ["self_consistency", "best_of_n", "rebase", "dora"],
        ),
    ],
)
def test_what_the_models_cannot_do_is_left_out(
    changes: dict[str, Any], engine: dict[str, Any], remaining: list[str]
) -> None:
    """Every search that is left out has a reason."""
    policies = ["self_consistency", "best_of_n", "rebase", "dora"]
    specs = [spec(policy, 4) for policy in policies]
    capabilities = ScriptedEngine(**engine).capabilities
    usable, reasons = possible(specs, Settings(**changes), capabilities)
    assert [search.policy for search in usable] == remaining
    assert set(reasons) == {f"{p} with vote majority" for p in policies if p not in remaining}
    assert all(reasons.values())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The engine that the commands get; its replies are ``say``'s."""
    scripted = ScriptedEngine(say=say)

    @asynccontextmanager
    async def running(_: Settings, *, attention: bool = False) -> AsyncIterator[RunningModel]:
        yield RunningModel(scripted, PlainText())

    monkeypatch.setattr(cli.tuning_run, "running", running)
    return scripted


def say(branch: Any) -> str:
    """Answer rightly for a quarter of the seeds; other replies each give another number."""
    text = babble(branch)
    if "answer" not in text:
        return text
    right = branch.seed % 4 == 0
    return f"The answer is {number_of(branch) if right else 100 + branch.seed % 1000}."


def tune(tmp_path: Path, *words: str) -> Result:
    """Run the command on a file of questions, in this process."""
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    args = ["tune", "--data", str(file), "--out", str(tmp_path / "tuned.toml"), "--engines", "1"]
    return CliRunner().invoke(app, [*args, *words])


SMALL = ("--policy", "self_consistency,best_of_n,rebase", "--width", "2,8", "--temperature", "1")


def test_a_file_is_written_that_a_server_takes(tmp_path: Path, engine: ScriptedEngine) -> None:
    """The file has the choices, their figures and the models; progress goes to stderr only."""
    invocation = tune(tmp_path, *SMALL, "--budget", "20000", "--json")
    assert invocation.exit_code == 0, invocation.output
    report = json.loads(invocation.stdout)
    first, *_, last = report["rungs"]
    assert (first["questions"], first["trees"]) == (8, 7)
    assert last["trees"] < 7
    for rung, next_rung in pairwise(report["rungs"]):
        assert next_rung["trees"] == rung["kept_trees"]
        assert rung["questions"] < next_rung["questions"] <= 24
    assert report["tokens"] <= report["grid_tokens"]
    tuned = read_tuned(load_settings({"HEDGEROW_TUNED": str(tmp_path / "tuned.toml")}).tuned)
    assert (tuned.data, tuned.policy_model) == ("numbers.jsonl", "sprig")
    assert tuned.reward_model == "sprig/prm"
    assert set(tuned.reasoning_effort) == {"low", "medium", "high"}
    rows = {name: row for row in report["rows"] for name in row["chosen"]}
    assert set(rows) == {"auto", "low", "medium", "high"}
    assert tuned.auto is not None
    assert tuned.auto.fields == rows["auto"]["search"]
    assert tuned.auto.accuracy == pytest.approx(rows["auto"]["accuracy"], abs=1e-4)
    assert tuned.auto.questions == report["rungs"][-1]["questions"]
    assert rows["low"]["tokens"] <= rows["medium"]["tokens"] <= rows["high"]["tokens"]
    assert "go on" in invocation.stderr


@pytest.mark.slow
@pytest.mark.promise(
    "`hedgerow tune`, started again after a failure, searches only what is missing and reports the "
    "same result."
)
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """The engine dies in the second rung; the restarted run searches only what is missing."""
    words = (*SMALL, "--budget", "300000", "--json", "--at-once", "1")
    whole = json.loads(tune(tmp_path, *words).stdout)
    calls, searches = len(engine.expanded), len(engine.released)
    (tmp_path / "tuned.jsonl").unlink()
    engine.expanded.clear()
    engine.released.clear()
    engine.fail_at = calls * 3 // 4
    cut = tune(tmp_path, *words)
    assert cut.exit_code == 1
    assert "the engine is down" in cut.stderr
    kept_rows = (tmp_path / "tuned.jsonl").read_text().count("\n")
    engine.fail_at, engine.down = None, False
    engine.released.clear()
    resumed = json.loads(tune(tmp_path, *words).stdout)
    assert 0 < kept_rows < searches
    assert len(engine.released) == searches - kept_rows
    for report in (whole, resumed):
        report.pop("seconds")
        for row in report["rows"]:
            row.pop("seconds")
    assert resumed == whole
    rows = [json.loads(line)["of"] for line in (tmp_path / "tuned.jsonl").read_text().splitlines()]
    assert len(rows) == len(set(rows)) == searches


def test_without_a_reward_model_chains_alone_are_tried(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """Stderr says what was left out; asking for it by name is refused with the reason."""
    engine.scores = False
    words = ("--reward-model", "none", "--width", "2,4", "--temperature", "1", "--budget", "100000")
    invocation = tune(tmp_path, *words, "--json")
    assert invocation.exit_code == 0, invocation.output
    assert {row["search"]["policy"] for row in json.loads(invocation.stdout)["rows"]} == {
        "self_consistency"
    }
    assert "left out: " in invocation.stderr
    refusal = tune(tmp_path, *words, "--policy", "self_consistency,beam")
    assert refusal.exit_code == 1
    assert "beam with vote weighted_majority: it needs rewards" in refusal.stderr


@pytest.mark.slow
def test_a_table_and_a_plot(tmp_path: Path, engine: ScriptedEngine) -> None:
    """Without ``--json`` a table is printed."""
    plot = tmp_path / "front.svg"
    invocation = tune(tmp_path, *SMALL, "--budget", "300000", "--plot", str(plot))
    assert invocation.exit_code == 0, invocation.output
    assert "the Pareto front" in invocation.stdout
    assert "less than the whole grid" in invocation.stdout
    assert ">rebase</text>" in plot.read_text()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((*SMALL, "--budget", "100"), 1, "tokens over the whole grid: at least"),
        (("--budget", "9", "--task", "game24"), 2, "exactly one of --data and --task"),
        (("--budget", "9", "--policy", "auto"), 2, "--policy auto: this is what is to be found"),
        (("--budget", "9", "--policy", "nope"), 2, "--policy nope: must be 'best_of_n'"),
        (("--budget", "9", "--vote", "nope"), 2, "--vote nope: known are weighted_majority"),
        (("--budget", "9", "--temperature", "hot"), 2, "--temperature hot: must be numbers"),
        (("--budget", "9", "--temperature", "9"), 2, "--temperature 9: must be less than"),
        (("--budget", "9", "--set", "vote=majority"), 2, "--set vote=majority: --vote and"),
        (("--budget", "9", "--width", "x"), 2, "--width x: must be whole numbers"),
        (("--budget", "9", "--width", ","), 2, "each needs at least one value"),
        (("--budget", "9", "--plot", "x.nope"), 2, "--plot x.nope: the suffix"),
        (("--budget", "9", "--out", "/no/such/folder/x.toml"), 2, "--out /no/such/folder/x.toml"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, engine: ScriptedEngine, words: tuple[str, ...], code: int, message: str
) -> None:
    """Mistakes are reported before any search where that is possible."""
    invocation = tune(tmp_path, *words)
    assert invocation.exit_code == code, invocation.output
    assert message in invocation.stderr
    assert code == 1 or engine.expanded == []


def test_rows_are_not_added_to_the_questions(tmp_path: Path, engine: ScriptedEngine) -> None:
    """``--keep`` refuses a file that holds something else, and names its first line."""
    invocation = tune(tmp_path, "--budget", "100000", "--keep", str(tmp_path / "numbers.jsonl"))
    assert invocation.exit_code == 1
    assert "numbers.jsonl, line 1: no result that was kept" in invocation.stderr
