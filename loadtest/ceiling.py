"""What the least KV of a width is: one leaf kept a round, and all the width below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, by_reward
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class KeepOne(LevelPolicy):
    """Every round the leaf with the highest reward gets the remaining width; ties: the lower id.

    A round then holds one path and the width's candidates, about as little as a policy that spends
    its width can hold: a yardstick for KV alone, since nothing diverse survives.
    """

    width: int
    scores: ClassVar[Scores] = Scores.ALL

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """The best leaf, alone."""
        best, *rest = by_reward(leaves, "keep one")
        return Round({best.id: spend}, tuple(sorted(node.id for node in rest)))
