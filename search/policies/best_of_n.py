"""Best of N: independent chains, of which only the finished replies are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from search.policies.policy import Round, Scores, remaining, share_evenly
from search.spec import SearchSpec
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class BestOfN:
    """``width`` chains that never look at each other, each scored once, at its end.

    A chain that dies at birth (an empty or looping step) leaves its share to the open chains,
    lower ids first. There are no other ties.
    """

    width: int
    scores: ClassVar[Scores] = Scores.FINISHED

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Self:
        """The policy as the spec sets it."""
        return cls(spec.width)

    def plan(self, tree: Tree) -> Round | None:
        """Every open chain goes on; the round spends the remaining width exactly, the spare width
        shared evenly, lower ids first."""
        leaves = [node.id for node in tree.leaves()]
        spend = remaining(tree, self.width)
        return Round(share_evenly(spend, leaves)) if leaves and spend else None
