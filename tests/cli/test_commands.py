"""The command line: only JSON on stdout, one clear line for a mistake, trees that replay."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import cli.calibrate
import cli.evaluation
import server.assemble
from cli.main import app
from cli.replay import first_difference, read_records
from search.tree_json import from_json, to_json
from server.assemble import RunningModel
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import PlainText

CALIBRATE = ["calibrate", "--task", "game24", "--out", "x"]
SOLVE = ["solve", "What is it?", "--width", "4", "--seed", "3"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The scripted engine, which commands get when they start an engine."""
    engine = ScriptedEngine()

    @asynccontextmanager
    async def running(_: Settings, *, attention: bool = False) -> AsyncIterator[RunningModel]:
        yield RunningModel(engine, PlainText())

    monkeypatch.setattr(server.assemble, "running", running)
    monkeypatch.setattr(cli.evaluation, "running", running)
    monkeypatch.setattr(cli.calibrate, "running", running)
    return engine


def run(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, list(words))


def test_solve_prints_the_growing_tree_the_reply_and_the_votes() -> None:
    """Without a terminal every step is printed on a line of its own."""
    invocation = run(*SOLVE)
    assert invocation.exit_code == 0
    assert "round 1: step 1 below 0: " in invocation.stdout
    assert "scores 0." in invocation.stdout
    assert "The answer is " in invocation.stdout
    assert "vote: weighted_majority" in invocation.stdout
    assert "rebase 4, seed 3" in invocation.stdout


def test_auto_is_left_to_the_settings(tmp_path: Path) -> None:
    """The output names the policy that was run: the tuned file's, with its width unless another is
    given; without a file the policy that suits the models."""
    tuned = tmp_path / "tuned.toml"
    tuned.write_text('[auto.search]\npolicy = "dora"\nwidth = 3\n')
    solve = ["solve", "?", "--policy", "auto", "--seed", "3", "--json"]
    for words, expected in (
        (["--tuned", str(tuned)], ("dora", 3)),
        (["--tuned", str(tuned), "--width", "2"], ("dora", 2)),
        ([], ("adaptive", 16)),
    ):
        document = json.loads(run(*solve, *words).stdout)
        assert (document["policy"], document["width"]) == expected
    invocation = run("eval", "--task", "game24", "--limit", "1", "--policy", "auto,beam", "--json")
    assert [r["policy"] for r in json.loads(invocation.stdout)["rows"]] == ["adaptive", "beam"]


def test_json_stands_alone_on_stdout() -> None:
    """Stdout holds one JSON document; the progress goes to stderr."""
    invocation = run(*SOLVE, "--json")
    document = json.loads(invocation.stdout)
    assert document["seed"] == 3
    assert document["policy"] == "rebase"
    assert "round 1: step 1" in invocation.stderr


def test_a_recorded_tree_replays(tmp_path: Path, scripted: ScriptedEngine) -> None:
    """The same engine grows the same tree; for another engine the first differing node is named."""
    record = tmp_path / "response.json"
    record.write_text(run(*SOLVE, "--json").stdout)
    invocation = run("replay", str(record))
    assert invocation.exit_code == 0
    assert "same tree" in invocation.stdout
    scripted.say = lambda b: "other\n\n" if b.child == 1 else babble(b)
    invocation = run("replay", str(record), "--json")
    row = json.loads(invocation.stdout)["rows"][0]
    assert invocation.exit_code == 1
    assert row["same"] is False
    assert row["recorded"] != row["replayed"]
    assert row["difference"].startswith("node ")


def test_a_chat_response_replays_by_its_digest(tmp_path: Path, scripted: ScriptedEngine) -> None:
    """A chat completion holds no tree, but all that is needed to grow the tree again."""
    document = json.loads(run(*SOLVE, "--json").stdout)
    search = {k: document[k] for k in ("spec", "messages", "tree_digest")}
    record = tmp_path / "chat.json"
    record.write_text(json.dumps({"object": "chat.completion", "search": search}))
    assert run("replay", str(record)).exit_code == 0
    search["tree_digest"] = "0" * 64
    record.write_text(json.dumps({"object": "chat.completion", "search": search}))
    invocation = run("replay", str(record))
    assert invocation.exit_code == 1
    assert "no tree was recorded" in invocation.stdout


def test_trees_are_lines_that_replay(tmp_path: Path) -> None:
    """``--trees`` appends one line per tree, for both solve and eval."""
    trees = tmp_path / "trees.jsonl"
    run(*SOLVE, "--trees", str(trees))
    invocation = run(
        "eval", "--task", "game24", "--limit", "2", "--width", "2", "--trees", str(trees)
    )
    assert invocation.exit_code == 0, invocation.output
    assert len(trees.read_text().splitlines()) == 3
    invocation = run("replay", str(trees), "--json")
    assert invocation.exit_code == 0
    assert len(json.loads(invocation.stdout)["rows"]) == 3


def test_any_field_of_a_search_can_be_set() -> None:
    """``--set`` takes JSON values and plain words, for both solve and eval."""
    dials = ["--set", "vote=majority", "--set", "max_depth=3", "--set", "consensus=certain"]
    spec = json.loads(run(*SOLVE, "--json", *dials).stdout)["spec"]
    assert (spec["vote"], spec["max_depth"], spec["consensus"]) == ("majority", 3, "certain")
    words = [
        "eval",
        "--task",
        "game24",
        "--limit",
        "1",
        "--width",
        "9",
        "--policy",
        "beam",
        "--json",
    ]
    digests = [
        json.loads(run(*words, *options).stdout)["rows"][0]["tree_digest"]
        for options in ([], ["--set", "beam_width=3"], ["--set", "beam_width=1"])
    ]
    assert digests[0] == digests[1] != digests[2]


def test_eval_compares_answers_as_it_is_told() -> None:
    """The scripted replies name numbers, but give no answer that the task itself can read."""
    words = ["eval", "--task", "game24", "--limit", "1", "--width", "4", "--json"]
    task, maths = (
        json.loads(run(*words, *options).stdout)["rows"][0]["tree_digest"]
        for options in ([], ["--answers", "maths"])
    )
    assert task != maths


def test_eval_prints_rows_for_all_combinations(tmp_path: Path) -> None:
    """Rows are policies times widths, in the order given; ``--plot`` writes the plot as well."""
    words = "--task game24 --split dev --limit 3 --policy beam,rebase --width 1,2 --seed 7 --json"
    picture = tmp_path / "plot.svg"
    invocation = run("eval", *words.split(), "--plot", str(picture))
    assert invocation.exit_code == 0, (invocation.output, invocation.exception)
    rows = json.loads(invocation.stdout)["rows"]
    assert [(r["policy"], r["width"]) for r in rows] == [
        ("beam", 1),
        ("beam", 2),
        ("rebase", 1),
        ("rebase", 2),
    ]
    assert all(r["n"] == 3 and r["seed"] == 7 and r["task"] == "game24" for r in rows)
    assert rows[0]["tree_digest"] == rows[2]["tree_digest"]  # at width 1 all policies are the same
    assert picture.read_text().startswith("<?xml")
    rerun = json.loads(run("eval", *words.split()).stdout)["rows"]
    assert [r["tree_digest"] for r in rerun] == [r["tree_digest"] for r in rows]


def test_eval_takes_a_file_and_several_seeds(tmp_path: Path) -> None:
    """Problems come from a file, in its order; one row covers all seeds."""
    task = tmp_path / "mine.jsonl"
    lines = [{"problem": f"What is {i}?", "answer": str(i)} for i in range(3)]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    invocation = run("eval", "--task", str(task), "--seed", "3,4", "--width", "2", "--json")
    assert invocation.exit_code == 0, invocation.output
    (row,) = json.loads(invocation.stdout)["rows"]
    assert (row["task"], row["n"], row["seed"]) == ("mine", 3, [3, 4])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["solve", "?", "--policy", "dfs"], "--policy dfs: must be 'best_of_n'"),
        (["solve", "?", "--width", "0"], "--width 0: must be greater than or equal to 1"),
        (["solve", "?", "--set", "beams=2"], "--set beams=2: must be name=value with one of "),
        (["solve", "?", "--set", "width=2"], "--set width=2: must be name=value with one of "),
        (["solve", "?", "--set", "beam_width"], "--set beam_width=: must be a valid integer"),
        (["solve", "?", "--set", "top_p=2"], "--set top_p=2: must be less than or equal to 1"),
        (["solve", "?", "--set", "consensus=2"], "--set consensus=2: must be 'certain' or a n"),
        (["solve", "?", "--kv-tokens", "1"], "HEDGEROW_KV_TOKENS = '1'"),
        (["solve", "?", "--trees", "/nowhere/x"], "--trees /nowhere/x: No such file"),
        (["eval", "--task", "game24", "--plot", "x.bmp1"], "--plot x.bmp1: the suffix must be"),
        (["eval", "--task", "game24", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
        (["eval", "--task", "chess"], "--task chess: known are game24"),
        (["eval", "--task", "game24", "--width", "1,x"], "--width x: must be whole numbers"),
        (["eval", "--task", "game24", "--seed", "-1"], "--seed -1: must be whole numbers"),
        (["eval", "--task", "game24", "--width", ","], "each needs at least one value"),
        (["eval", "--task", "/nowhere.jsonl"], "--task /nowhere.jsonl: "),
        (["eval", "--task", "game24", "--model", "/nowhere"], "= '/nowhere': there is no such"),
        (["eval", "--task", "game24", "--model", "no/such"], "hf download no/such"),
        (["replay", "/nowhere.json"], "No such file"),
        (["calibrate", "--task", "game24", "--out", "/nowhere/x"], "--out /nowhere/x: a file in"),
        ([*CALIBRATE, "--policy", "mcts,rebase"], "--policy rebase: one that goes back is needed"),
        ([*CALIBRATE, "--engine", "sglang"], "HEDGEROW_ENGINE = 'sglang': 'embedded' is needed"),
        ([*CALIBRATE, "--kv-policy", "lru"], "HEDGEROW_KV_POLICY = 'lru': 'arborkv' is needed"),
        ([*CALIBRATE, "--kv-theta", "/no"], "HEDGEROW_KV_THETA = '/no': there is no such file"),
        (["calibrate", "--task", ",", "--out", "x"], "--task: none; at least one is needed"),
        (["solve", "?", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: "),
    ],
)
def test_mistakes_are_one_line_on_stderr(words: list[str], message: str) -> None:
    """The line has the option, its value and what is allowed; exit code not 0; empty stdout."""
    invocation = run(*words)
    assert invocation.exit_code != 0
    assert invocation.stderr.startswith("hedgerow: ")
    assert message in invocation.stderr
    assert invocation.stdout.strip() == ""


def test_an_engine_that_fails_is_one_line(scripted: ScriptedEngine) -> None:
    """An engine failure prints one line, without a traceback."""
    scripted.fail_at = 0
    invocation = run(*SOLVE)
    assert invocation.exit_code == 1
    assert "hedgerow: the engine is down" in invocation.stderr
    scripted.down, scripted.fail_at = False, 1
    invocation = run("eval", "--task", "game24", "--limit", "2", "--json")
    assert invocation.exit_code == 1
    assert "hedgerow: the engine is down" in invocation.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("no json", "neither JSON nor JSON lines"),
        ("[]", "must hold a JSON object"),
        ('{"choices": []}', "missing: spec, messages, tree_digest"),
        ('{"spec": {"policy": "x"}, "messages": [], "tree_digest": ""}', "SearchSpec.policy = 'x'"),
    ],
)
def test_files_that_hold_no_search_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file and what is missing."""
    record = tmp_path / "wrong.json"
    record.write_text(text)
    invocation = run("replay", str(record))
    assert invocation.exit_code == 2
    assert str(record) in invocation.stderr
    assert message in invocation.stderr


def test_the_first_difference_is_found(tmp_path: Path) -> None:
    """By node id: another prompt, another reward, a missing node, or only another answer."""
    record = tmp_path / "response.json"
    record.write_text(run(*SOLVE, "--json").stdout)
    (entry,) = read_records(record)
    assert entry.tree is not None
    document = json.loads(json.dumps(to_json(entry.tree)))

    def compare() -> str:
        assert entry.tree is not None
        return first_difference(entry.tree, from_json(document))

    assert compare() == "the nodes are the same; the answers differ"
    node = document["nodes"].pop()
    assert (
        compare()
        == f"node {node['id']}: one tree has {node['id'] + 1} nodes, the other {node['id']}"
    )
    document["nodes"][2]["reward"] = 0.0
    assert compare().startswith("node 3, reward: ")
    document["prompt"][0] += 1
    assert compare() == "the prompts differ"
