"""Analyses the trees of ``hedgerow eval``: which losses they have, and at which depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from rich.table import Table

from cli.custom_dataset import CustomDataset
from models.tasks.task import Task
from search.anatomy import (
    JudgedStep,
    auc,
    distinct_replies,
    distinct_tokens,
    judged_steps,
    lineages_by_depth,
    step_labels,
)
from search.outcome import Outcome

COLUMNS = (
    "policy",
    "width",
    "accuracy",
    "coverage loss",
    "selection loss",
    "distinct replies",
    "lineages by depth",
    "AUC by depth",
    "illegal",
    "tokens",
    "distinct",
)


@dataclass(frozen=True, slots=True)
class TreeAnatomy:
    """The analysis of one tree. ``illegal``: whether the chosen reply has an illegal step, None if
    unknown; ``steps``: judged by the task's checker, if it judges steps."""

    distinct_replies: int
    distinct_tokens: int
    lineages: tuple[int, ...]
    steps: tuple[JudgedStep, ...]
    illegal: bool | None


def anatomy_of(task: Task | CustomDataset, question: str, outcome: Outcome) -> TreeAnatomy:
    """Analyse a search's tree with the task's checker."""
    tree = outcome.tree
    labels = step_labels(tree, lambda text: task.check(question, text).steps)
    illegal = None
    if outcome.chosen is not None and not isinstance(task, CustomDataset):
        illegal = task.first_illegal(question, outcome.text) is not None
    return TreeAnatomy(
        distinct_replies(tree),
        distinct_tokens(tree),
        tuple(lineages_by_depth(tree)),
        tuple(judged_steps(tree, labels)),
        illegal,
    )


def together(trees: Sequence[TreeAnatomy], accuracy: float, pass_at_n: float) -> dict[str, Any]:
    """Summarise the trees of one row. ``pass_at_n``: the share of trees with a right trajectory.

    ``coverage_loss``: the share without a right trajectory; ``selection_loss``: the share with one
    that the vote did not choose. ``distinct_replies``, ``lineages_by_depth``: means over trees; a
    finished tree keeps its last number. ``auc_by_depth``: over the distinct steps below right ones
    of all trees, None without a right or without a wrong one; ``judged_steps``: their number.
    ``illegal_replies``: the share among replies that a checker judges, None if there are none.
    ``distinct_tokens``: ``generated_tokens`` with those of equal steps counted once.
    """
    deepest = max((len(tree.lineages) for tree in trees), default=0)
    steps = list(chain.from_iterable(tree.steps for tree in trees))
    by_depth = [[s for s in steps if s.depth == d] for d in range(1, deepest + 1)]
    verdicts = [tree.illegal for tree in trees if tree.illegal is not None]
    return {
        "coverage_loss": 1.0 - pass_at_n if trees else 0.0,
        "selection_loss": pass_at_n - accuracy,
        "distinct_replies": fmean(tree.distinct_replies for tree in trees) if trees else 0.0,
        "lineages_by_depth": [
            fmean(at(tree.lineages, d) for tree in trees) for d in range(deepest)
        ],
        "auc_by_depth": [auc(of_depth) for of_depth in by_depth] if steps else [],
        "judged_steps": len(steps),
        "illegal_replies": sum(verdicts) / len(verdicts) if verdicts else None,
        "distinct_tokens": sum(tree.distinct_tokens for tree in trees),
    }


def at(lineages: Sequence[int], depth: int) -> int:
    """The number of lineages at a depth, from 0, or the last number if the tree is shallower."""
    return lineages[min(depth, len(lineages) - 1)] if lineages else 0


def anatomy_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table of one evaluation's rows; a depth without right or without wrong steps has a dash."""
    table = Table(*COLUMNS, title="anatomy: what was not covered, what was not chosen, and why")
    for row in rows:
        anatomy = row["anatomy"]
        illegal = anatomy["illegal_replies"]
        table.add_row(
            row["policy"],
            str(row["width"]),
            f"{row['accuracy']:.1%}",
            f"{anatomy['coverage_loss']:.1%}",
            f"{anatomy['selection_loss']:.1%}",
            f"{anatomy['distinct_replies']:.1f}",
            " ".join(f"{mean:.1f}" for mean in anatomy["lineages_by_depth"]),
            " ".join("-" if v is None else f"{v:.2f}" for v in anatomy["auc_by_depth"]) or "-",
            "-" if illegal is None else f"{illegal:.1%}",
            f"{row['generated_tokens']:,}",
            f"{anatomy['distinct_tokens']:,}",
        )
    return table
