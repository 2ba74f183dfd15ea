"""Particle filtering: resample the open trajectories by the odds of their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, exp, fsum, log
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, rewards_of
from search.spec import SearchSpec
from search.tree import ROOT, UNITS, Node, NodeState, Tree, node_seed

SURE = 0.5 / UNITS
"""Rewards are clipped to this distance from 0 and 1: half of the rounding unit."""


@dataclass(frozen=True, slots=True)
class ParticleFilter(LevelPolicy):
    """Systematic resampling of the open leaves by the logit of their rewards (Puri et al. 2025).

    A leaf weighs softmax(logit(reward)), which is its odds r / (1 - r) over the sum of all odds.
    A trajectory that ended keeps its place: it is neither copied nor dropped, and the round fills
    the remaining places. (The published method resamples ended ones too, so that copies of one
    take the places of others.) The offset follows from the search's seed and the level, so
    a tree has one plan. Leaves are laid out by id; there are no other ties.

    Two dials, off by default. ``ess_threshold`` below 1: a level is resampled only where the
    effective sample size, (sum of w)^2 / sum of w^2, is at most that share of its leaves, or where
    leaves and places are not equally many; else each leaf has one child, which inherits its weight:
    the weights of a path multiply from one resampling to the next, as in any sequential Monte Carlo
    method. ``soft_start``: a level is resampled by w^(1/t) with t = N / ESS * (1 - depth /
    ``max_depth``), never below 1: reward models are overconfident early, which shows as a small
    sample size [our reading of entropic particle filtering, arXiv 2510.05825].
    """

    width: int
    seed: int
    ess_threshold: float = 1.0
    soft_start: bool = False
    max_depth: int = 25
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> ParticleFilter:
        """The policy as the spec sets it; a search has a seed, a spec without one gets 0."""
        dials = spec.ess_threshold, spec.soft_start, spec.max_depth
        return cls(spec.width, spec.seed or 0, *dials)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Resample the leaves: each gets as many children as it is drawn times."""
        depth, weights = leaves[0].depth, self.weights(tree, leaves)
        if not self._resamples(weights, spend):
            return Round({leaf.id: 1 for leaf in leaves})
        if self.soft_start:
            weights = softened(weights, 1 - depth / self.max_depth)
        copies = systematic(weights, spend, offset(self.seed, depth))
        return Round.of(leaves, {leaf.id: n for leaf, n in zip(leaves, copies, strict=True)})

    def weights(self, tree: Tree, leaves: list[Node]) -> list[float]:
        """The leaves' odds, times those of the steps above since the last resampling.

        Up to a common factor, since only their shares count.
        """
        odds = [odds_of(reward) for reward in rewards_of(leaves, "particle_filter")]
        if self.ess_threshold == 1.0:
            return odds
        inherited_logs = self._inherited_logs(tree, leaves[0].depth)
        logs = [log(o) + inherited_logs[leaf.parent] for o, leaf in zip(odds, leaves, strict=True)]
        return shares_of(logs)

    def _inherited_logs(self, tree: Tree, depth: int) -> dict[int, float]:
        """The logarithms of the weights that leaves at ``depth`` inherit, by their parents' ids.

        Every level above is evaluated as it was when it was planned.
        """
        inherited_logs = {ROOT: 0.0}
        for level in range(1, depth):
            pool = [n for n in tree.nodes if n.depth == level and n.state is not NodeState.FINISHED]
            leaves = [node for node in pool if not node.finish.dies_at_birth]
            finished = sum(node.depth <= level for node in tree.finished())
            logs = {n.id: log(odds_of(n.reward or 0.0)) + inherited_logs[n.parent] for n in leaves}
            resampled = self._resamples(shares_of(list(logs.values())), self.width - finished)
            inherited_logs = {node: 0.0 if resampled else value for node, value in logs.items()}
        return inherited_logs

    def _resamples(self, weights: Sequence[float], places: int) -> bool:
        """Whether a level with these weights is resampled to fill ``places``."""
        if self.ess_threshold == 1.0 or len(weights) != places:
            return True
        return effective_size(weights) <= self.ess_threshold * places


def shares_of(logs: Sequence[float]) -> list[float]:
    """The weights with these logarithms, up to a common factor: the largest is 1."""
    top = max(logs)
    return [exp(value - top) for value in logs]


def effective_size(weights: Sequence[float]) -> float:
    """(sum of w)^2 / sum of w^2: how many equal weights are as informative, from 1 to their number.

    Rounded to 1e-9, so that equal weights come to a whole number.
    """
    return round(fsum(weights) ** 2 / fsum(weight * weight for weight in weights), 9)


def softened(weights: Sequence[float], remaining: float) -> list[float]:
    """The weights to the power 1/t, t = max(1, N / ESS * remaining); ``remaining``: in [0, 1]."""
    temperature = max(1.0, len(weights) / effective_size(weights) * remaining)
    return [weight ** (1 / temperature) for weight in weights]


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
