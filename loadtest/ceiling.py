"""What the least KV of a width is: one leaf kept a round, and all the width below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.policy import Round, Scores, by_reward, remaining
from search.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class KeepOne:
    """Every round the leaf with the highest reward gets the remaining width; ties: the lower id.

    A round then holds one path and the width's candidates, about as little as a policy that spends
    its width can hold: a yardstick for KV alone, since nothing diverse survives.
    """

    width: int
    scores: ClassVar[Scores] = Scores.ALL

    def plan(self, tree: Tree) -> Round | None:
        """The root to the whole width, then the best leaf to what remains of it."""
        leaves = list(tree.leaves())
        spend = remaining(tree, self.width)
        if not leaves or not spend:
            return None
        if leaves[0].id == ROOT:
            return Round({ROOT: spend})
        best, *rest = by_reward(leaves, "keep one")
        return Round({best.id: spend}, tuple(sorted(node.id for node in rest)))
