"""``hedgerow export``: recorded trees as lines, one line per step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from models.tasks import TASKS
from search.spec import SearchSpec
from search.tree import ROOT, Finish, Tree
from search.tree_json import from_json, to_json
from tests.search.scripted_engine import ScriptedEngine, grow

GAME24 = TASKS["game24"]


def run(*words: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["export", *map(str, words)])


def rows(invocation: Result) -> list[dict[str, Any]]:
    """Return the lines of stdout, parsed."""
    assert invocation.exit_code == 0, invocation.output
    return [json.loads(line) for line in invocation.stdout.splitlines()]


async def test_a_recorded_tree_is_all_there(tmp_path: Path) -> None:
    """The prompt is the first line; joining the ids of a path's lines gives the path's ids."""
    outcome = await grow(ScriptedEngine(), SearchSpec(policy="rebase", width=6, seed=3))
    file = tmp_path / "trees.jsonl"
    document = {"id": "search-1", "messages": [], "tree": to_json(outcome.tree)}
    file.write_text(f"{json.dumps(document)}\n\n{json.dumps({'tree': to_json(outcome.tree)})}\n")
    lines = rows(run(file))
    first = [line for line in lines if line["tree"] == "search-1"]
    assert [line["node"] for line in first] == [*range(len(outcome.tree))]
    assert {line["tree"] for line in lines} == {"search-1", "tree-1"}
    assert len(lines) == 2 * len(outcome.tree)
    assert first[0]["parent"] is None
    for node in outcome.tree.finished():
        ids, step = [], first[node.id]
        while step is not None:
            ids = [*step["tokens"], *ids]
            step = None if step["parent"] is None else first[step["parent"]]
        assert tuple(ids) == outcome.tree.tokens(node.id)
        assert first[node.id]["value"] == first[node.id]["reward"] == node.reward
    tree = from_json(document["tree"])
    assert [line["logprob"] for line in first[1:]] == [node.logprob for node in tree.nodes[1:]]


def test_by_its_checker_a_trajectory_is_right_or_wrong(tmp_path: Path) -> None:
    """A bundled task's checker: one reply of two is right, each 0.5 from the prompt's value."""
    question = GAME24.questions("dev", 1)[0]
    tree = Tree([7])
    right = "\n\n".join(GAME24.solve(question, random.Random(1)))
    for text in (right, "The answer is 5."):
        tree.add(ROOT, [1], text, Finish.END).reward = 0.5
    file = tmp_path / "trees.jsonl"
    messages = [{"role": "user", "content": question}]
    file.write_text(json.dumps({"id": "s", "messages": messages, "tree": to_json(tree)}))
    lines = rows(run(file, "--returns", "checker"))
    assert [line["value"] for line in lines] == [0.5, 1.0, 0.0]
    assert [line["advantage"] for line in lines] == [None, 0.5, -0.5]


TREE = to_json(Tree([7]))


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{", (), "line 1: no JSON"),
        ('{"id": "a"}', (), "line 1: holds no tree"),
        ("[]", (), "line 1: holds no tree"),
        (json.dumps({"tree": TREE | {"version": 9}}), (), "line 1: tree.version: 9"),
        (json.dumps({"tree": TREE}), ("--returns", "checker"), "no bundled task's question"),
    ],
)
def test_what_is_no_tree_is_named(
    tmp_path: Path, content: str, words: tuple[str, ...], message: str
) -> None:
    """One line names the file, its line and what is wrong with it."""
    file = tmp_path / "trees.jsonl"
    file.write_text(content)
    invocation = run(file, *words)
    assert invocation.exit_code == 2
    assert invocation.stderr.count("\n") == 1
    assert message in invocation.stderr


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The command exits with code 2 and names the file."""
    invocation = run(tmp_path / "none.jsonl")
    assert invocation.exit_code == 2
    assert "none.jsonl" in invocation.stderr
