"""Particle filtering: the open trajectories are drawn again, by the odds their rewards give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, rewards_of
from search.spec import SearchSpec
from search.tree import UNITS, Node, Tree, node_seed

SURE = 0.5 / UNITS
"""Rewards are taken to lie this far within (0, 1): half of what rounding hides."""


@dataclass(frozen=True, slots=True)
class ParticleFilter(LevelPolicy):
    """Systematic resampling of the open leaves by the logit of their rewards (Puri et al. 2025).

    A leaf weighs softmax(logit(reward)), which is its odds r / (1 - r) over the sum of all odds.
    A trajectory that ended keeps its place: it is neither copied nor drawn out, and the round goes
    over the places that are left. (The published method resamples ended ones too, so that copies
    of one take the places of others.) The offset follows from the search's seed and the level, so
    a tree has one plan. Leaves are laid out by id; there are no other ties.
    """

    width: int
    seed: int
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> ParticleFilter:
        """The policy as the spec sets it; a search always has a seed, a mere question has 0."""
        return cls(spec.width, spec.seed or 0)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """As many children a leaf as it is drawn."""
        odds = [odds_of(reward) for reward in rewards_of(leaves, "particle_filter")]
        copies = systematic(odds, spend, offset(self.seed, leaves[0].depth))
        expand = {leaf.id: n for leaf, n in zip(leaves, copies, strict=True) if n}
        return Round(expand, tuple(leaf.id for leaf in leaves if leaf.id not in expand))


def odds_of(reward: float) -> float:
    """exp(logit(reward)), finite and positive for every reward in [0, 1]."""
    inside = min(max(reward, SURE), 1 - SURE)
    return inside / (1 - inside)


def offset(seed: int, level: int) -> float:
    """A number in (0, 1), the same for the same seed and level.

    It is an odd multiple of 2**-33: far enough from 0 and 1 that no rounding of a share that is a
    whole number can cross it.
    """
    return ((node_seed(seed, "resample", (level,)) >> 32) + 0.5) / 2**32


def systematic(weights: Sequence[float], total: int, start: float) -> list[int]:
    """How many of the ``total`` points (start + j) / total fall into each weight's stretch.

    ``start``: in [0, 1). The stretches lie end to end in [0, 1), in the order given, as long as
    their weights' shares. The counts add up to ``total``; each is its exact share rounded up or
    down.
    """
    ends = list(accumulate(weights))
    below = [0, *(ceil(total * (end / ends[-1]) - start) for end in ends)]
    return [high - low for low, high in pairwise(below)]
