"""Tree of Thoughts, breadth first: a few thoughts for each kept step, the most valued go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.policy import Round, Scores, by_reward, remaining
from search.spec import SearchSpec
from search.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class TotBfs:
    """Algorithm 2 of the SEED paper with its value strategy: draw ``branch`` thoughts for each kept
    leaf, then keep the ``breadth`` thoughts of the level with the highest reward.

    The paper stops at a depth and completes the best state; here a trajectory finishes when the
    model ends it or it reaches its depth or length limit, and then leaves its level. ``width``
    bounds the trajectories that finish: a round draws ``branch`` thoughts for each kept leaf, best
    first, but no more than remain to be finished, so the last leaf may get fewer. A search that
    keeps few leaves ends before its width is spent. Ties: the lower id.
    """

    width: int
    branch: int
    breadth: int
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> TotBfs:
        """The policy as the spec sets it; by default a level's thoughts fill the width."""
        return cls(spec.width, spec.branch, spec.breadth or max(1, spec.width // spec.branch))

    def plan(self, tree: Tree) -> Round | None:
        """Draw thoughts for the root, then for the best leaves; give up the others."""
        leaves = list(tree.leaves())
        places = remaining(tree, self.width)
        if not leaves or not places:
            return None
        ranked = [ROOT] if leaves[0].id == ROOT else [n.id for n in by_reward(leaves, "tot_bfs")]
        leaf_count = min(self.breadth, -(-places // self.branch))
        expand = {}
        for node in ranked[:leaf_count]:
            expand[node] = min(self.branch, places)
            places -= expand[node]
        return Round(expand, tuple(sorted(ranked[leaf_count:])))
