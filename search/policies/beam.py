"""Beam search over steps: keep the best, expand them evenly, drop the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, beams_of, by_reward, share_evenly
from search.spec import SearchSpec
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Beam(LevelPolicy):
    """Keeps ``beams`` leaves a round and expands them to the remaining width together.

    The published code rounds each beam's share up and so exceeds its width; here the shares add up
    to it: the remainder goes to the better beams. Ties, in keeping and in sharing: the lower id.
    """

    width: int
    beams: int
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Beam:
        """The policy as the spec sets it; ``beams`` defaults to the rounded-up root of width."""
        return cls(spec.width, beams_of(spec))

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """The best leaves, evenly."""
        ranked = [node.id for node in by_reward(leaves, "beam")]
        keep = min(self.beams, spend)
        return Round(share_evenly(spend, ranked[:keep]), tuple(sorted(ranked[keep:])))
