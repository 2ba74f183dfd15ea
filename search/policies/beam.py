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
    With ``filter_duplicates``, as in the published recipes, leaves with the same steps from the
    root count as one beam: otherwise the best step, drawn often, would soon be every beam. If
    there are fewer distinct leaves than beams, they share the width.
    """

    width: int
    beams: int
    filter_duplicates: bool = True
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Beam:
        """The policy as the spec sets it; ``beams`` defaults to the rounded-up root of width."""
        return cls(spec.width, beams_of(spec), spec.filter_duplicates)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Share ``spend`` evenly among the best leaves."""
        ranked: dict[int, int] = {}
        for leaf in by_reward(leaves, "beam"):
            ranked.setdefault(leaf.first if self.filter_duplicates else leaf.id, leaf.id)
        beams = list(ranked.values())[: min(self.beams, spend)]
        return Round.of(leaves, share_evenly(spend, beams))
