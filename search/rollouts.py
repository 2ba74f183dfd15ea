"""Trees as training data: the value of each step, and its advantage over its parent.

The value of a node is the mean return of the finished trajectories at and below it, each counted
once, and the advantage of a step its value less its parent's: the local advantage of TreeRL
(arXiv 2506.11902). A step's parent has the mean of its children's trajectories, so the
step is compared with its siblings, itself among them. Along a trajectory the advantages add up to
its return less the root's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search.tree import ROOT, Node, NodeState, Tree


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A node with its value and advantage; the root is the prompt.

    ``trajectories``: how many with a known return end at or below it; ``value`` is None if there
    are none, ``advantage`` then and for the root.
    """

    node: Node
    trajectories: int
    value: float | None
    advantage: float | None


def final_reward(tree: Tree, node: Node) -> float | None:
    """The return of a finished trajectory by the reward model alone: its last reward."""
    del tree
    return node.reward


def rollout_steps(
    tree: Tree, return_of: Callable[[Tree, Node], float | None] = final_reward
) -> list[RolloutStep]:
    """All nodes in id order, the root first. ``return_of``: the return of the trajectory that a
    finished node ends; None: it is not known, and the trajectory is not counted."""
    sums, counts = [0.0] * len(tree), [0] * len(tree)
    for node in reversed(tree.nodes):  # parents have lower ids
        if node.state is NodeState.FINISHED and (reached := return_of(tree, node)) is not None:
            sums[node.id] += reached
            counts[node.id] += 1
        if node.id != ROOT:
            sums[node.parent] += sums[node.id]
            counts[node.parent] += counts[node.id]
    values = [total / n if n else None for total, n in zip(sums, counts, strict=True)]
    return [
        RolloutStep(node, counts[node.id], values[node.id], _advantage(node, values))
        for node in tree.nodes
    ]


def _advantage(node: Node, values: Sequence[float | None]) -> float | None:
    value, above = values[node.id], None if node.id == ROOT else values[node.parent]
    return None if value is None or above is None else value - above
