"""Explain a tree's accuracy: how much it explored, how alike its trajectories are, and how well its
rewards rank its steps.

A *lineage* is a child of the root with all its descendants. Steps are compared by their whole path:
twins, which are nodes with the same steps from the root, count once wherever it says distinct.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from search.tree import ROOT, NodeState, Tree


class JudgedStep(NamedTuple):
    """A distinct step below right steps only: its depth, its reward, and whether it is right."""

    depth: int
    reward: float
    right: bool


def distinct_replies(tree: Tree) -> int:
    """Count the finished trajectories that are no twins of an earlier one."""
    return sum(node.first == node.id for node in tree.finished())


def distinct_tokens(tree: Tree) -> int:
    """Count the generated tokens, those of twins once."""
    return sum(len(node.tokens) for node in tree.nodes if node.first == node.id)


def lineages_by_depth(tree: Tree) -> list[int]:
    """Count the distinct lineages alive at depth 1, 2, ... down to the deepest step.

    A lineage is alive at a depth if it has a step there that is neither empty nor a loop, or has
    finished a trajectory there or above.
    """
    deepest = max((node.depth for node in tree.nodes), default=0)
    alive: list[set[int]] = [set() for _ in range(deepest)]
    lineage = {ROOT: ROOT}
    for node in tree.nodes[1:]:
        lineage[node.id] = lineage[node.parent] or node.first
        if node.state is NodeState.FINISHED:
            for level in alive[node.depth - 1 :]:
                level.add(lineage[node.id])
        elif not node.finish.dies_at_birth:
            alive[node.depth - 1].add(lineage[node.id])
    return [len(level) for level in alive]


def step_labels(tree: Tree, check: Callable[[str], Sequence[bool]]) -> dict[int, bool]:
    """Whether each distinct step is right, by the id of its first node.

    ``check`` takes the text of a path and says for each step whether it and all before it are
    right. A path is left out if ``check`` returns another number of verdicts than the path has
    steps, as happens when steps are cut by length; dead steps are left out too.
    """
    labels: dict[int, bool] = {}
    for node in reversed(tree.nodes[1:]):
        if node.first != node.id or node.id in labels or node.finish.dies_at_birth:
            continue
        chain = tree.chain(node.id)
        verdicts = check(tree.text(node.id))
        if len(verdicts) == len(chain):
            labels |= {step.first: right for step, right in zip(chain, verdicts, strict=True)}
    return labels


def judged_steps(tree: Tree, labels: Mapping[int, bool]) -> list[JudgedStep]:
    """The distinct steps that have a reward and a label and whose ancestors are all right."""
    return [
        JudgedStep(node.depth, node.reward, labels[node.id])
        for node in tree.nodes[1:]
        if node.id in labels
        and node.reward is not None
        and (node.parent == ROOT or labels.get(tree[node.parent].first, False))
    ]


def auc(steps: Sequence[JudgedStep]) -> float | None:
    """The share of pairs of a right and a wrong step in which the right one has the higher reward;
    a tie counts as half. None if there is no such pair."""
    wrong = sorted(step.reward for step in steps if not step.right)
    right = [step.reward for step in steps if step.right]
    if not wrong or not right:
        return None
    twice = sum(bisect_left(wrong, reward) + bisect_right(wrong, reward) for reward in right)
    return twice / (2 * len(wrong) * len(right))
