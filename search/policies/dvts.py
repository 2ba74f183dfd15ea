"""DVTS: the width is split into subtrees below the root, each searched by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, beams_of, by_reward, share_evenly
from search.spec import SearchSpec
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Dvts(LevelPolicy):
    """Diverse verifier tree search (Beeching et al. 2024; ETS paper, section 5.1).

    The root's children fall, in order, into ``subtrees`` runs whose lengths differ by at most one,
    the longer ones first. From then on each subtree keeps its best open leaf and expands it to what
    the subtree has left; ties go to the lower id. A subtree that dies (its leaves were empty or
    loops) leaves what it has not finished to the living ones, evenly, the lower ones first.

    The published codes differ: they give N // subtrees children to each, which loses a remainder;
    ours add up to the width. Trajectories that ended are kept and never compete with the open ones;
    candidates of the last step are trajectories only if they ended.
    """

    width: int
    subtrees: int
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Dvts:
        """The policy as the spec sets it; at most ``width`` subtrees."""
        return cls(spec.width, min(beams_of(spec), spec.width))

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Expand the best leaf of every living subtree."""
        best: dict[int, Node] = {}
        for leaf in by_reward(leaves, "dvts"):
            best.setdefault(self.subtree(leaf), leaf)
        finished = Counter(self.subtree(node) for node in tree.finished())
        ends = self.ends(sorted(best), finished)
        return Round.of(leaves, {best[i].id: ends[i] - finished[i] for i in ends})

    def subtree(self, node: Node) -> int:
        """Which subtree a node below the root belongs to, from 0: the run its ancestor is in."""
        runs = accumulate(self._shares().values())
        return next(i for i, end in enumerate(runs) if node.path[0] < end)

    def ends(self, living: list[int], finished: Mapping[int, int]) -> dict[int, int]:
        """How many trajectories each living subtree has to finish in all, by rising subtree.

        ``finished``: trajectories by subtree. What dead subtrees leave over never shrinks while
        subtrees die, so that no subtree's number falls below what it has finished.
        """
        shares = self._shares()
        remainder = sum(shares[i] - finished[i] for i in shares if i not in living)
        each, more = divmod(remainder, len(living))
        return {i: shares[i] + each + (n < more) for n, i in enumerate(living)}

    def _shares(self) -> dict[int, int]:
        return share_evenly(self.width, range(self.subtrees))
