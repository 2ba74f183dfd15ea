"""Self-consistency: independent chains without any reward, made for a majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.best_of_n import go_on
from search.policies.policy import Round, Scores
from search.spec import SearchSpec
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """``width`` chains that never look at each other and need no reward model.

    A chain that dies at birth leaves its share to the open chains, lower ids first. There are no
    other ties.
    """

    width: int
    scores: ClassVar[Scores] = Scores.NONE

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> SelfConsistency:
        """The policy as the spec sets it."""
        return cls(spec.width)

    def plan(self, tree: Tree) -> Round | None:
        """Every open chain goes on; the round spends the remaining width exactly."""
        return go_on(tree, self.width)
