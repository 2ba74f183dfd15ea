"""``hedgerow export``: prints recorded trees as rollouts for training, a line of JSON a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cli.arguments import Returns
from models.tasks import TASKS
from models.tasks.task import Task
from search.rollouts import RolloutStep, final_reward, rollout_steps
from search.tree import ROOT, Node, Tree
from search.tree_json import from_json
from server.prompts import question_of

ReturnOf = Callable[[Tree, Node], float | None]


class ExportError(ValueError):
    """A line of the file has no tree, or no task's checker fits it; the message names the line."""


def export_steps(path: Path, returns: Returns) -> Iterator[dict[str, Any]]:
    """Yield the steps of every tree of a file written by ``--trees``, tree after tree.

    Raises ExportError when it comes to a wrong line.
    """
    for number, (where, document) in enumerate(_documents(path)):
        tree, name = _tree(where, document), document.get("id", f"tree-{number}")
        return_of = final_reward
        if returns == "checker":
            return_of = _checker_return(where, document)
        for step in rollout_steps(tree, return_of):
            yield {"tree": name, **_line(step, tree.prompt)}


def _line(step: RolloutStep, prompt: tuple[int, ...]) -> dict[str, Any]:
    """The line of a step; the root's line is the prompt, without parent, logprob and finish."""
    node, root = step.node, step.node.id == ROOT
    return {
        "node": node.id,
        "parent": None if root else node.parent,
        "tokens": prompt if root else node.tokens,
        "text": node.text,
        "logprob": None if root else node.logprob,
        "reward": node.reward,
        "value": step.value,
        "advantage": step.advantage,
        "trajectories": step.trajectories,
        "finish": None if root else node.finish.value,
        "state": node.state.value,
    }


def _documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's name for messages and its document."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                if line.strip():
                    yield where, _document(where, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path}: {error}") from error


def _document(where: str, line: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ExportError(f"{where}: no JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("tree"), dict):
        raise ExportError(f"{where}: holds no tree; a document of /v1/search, or of --trees, does")
    return document


def _tree(where: str, document: dict[str, Any]) -> Tree:
    try:
        return from_json(document["tree"])
    except ValueError as error:
        raise ExportError(f"{where}: {error}") from error


def _checker_return(where: str, document: dict[str, Any]) -> ReturnOf:
    """The return by the checker of the question's bundled task. Raises ExportError without one."""
    question = question_of(document["messages"]) if document.get("messages") else ""
    task: Task | None = next((t for t in TASKS.values() if t.matches(question)), None)
    if task is None:
        names = ", ".join(TASKS)
        raise ExportError(f"{where}: no bundled task's question; only {names} can be checked")
    before = document.get("branched_from", {}).get("text", "")
    check = task.check
    return lambda tree, node: float(check(question, before + tree.text(node.id)).correct)
