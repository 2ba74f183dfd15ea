"""REBASE: every leaf gets children in proportion to the softmax of its reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp
from typing import ClassVar

from search.policies.floor import with_floor
from search.policies.policy import LevelPolicy, Round, Scores, by_reward, restarts_of
from search.policies.restarts import Restarts
from search.spec import SearchSpec
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Rebase(LevelPolicy):
    """Balanced tree search by equation (1) of the ETS paper.

    Leaves are served by falling reward, equal rewards by rising id, so that a remainder goes to the
    lower id. A leaf that gets no child is pruned.

    Three dials are ours, and off by default. ``mass`` below 1: leaves with the same steps from the
    root are one, whose weight is their number to the power ``mass`` times exp(R/T); its children
    are drawn at the lowest id, and leaves are served by falling weight. At 0 a step that was drawn
    often weighs no more than one that was drawn once. ``floor_levels``: down to that depth no
    distinct leaf is given up while there is a child for it (``with_floor``). ``restarts``: see
    ``Restarts``.
    """

    width: int
    temperature: float
    mass: float = 1.0
    floor_levels: int = 0
    restarts: Restarts | None = None
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Rebase:
        """The policy as the spec sets it."""
        dials = spec.mass, spec.floor_levels, restarts_of(spec)
        return cls(spec.width, spec.reward_temperature, *dials)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Share ``spend`` among the leaves by their rewards."""
        ranked = by_reward(leaves, "rebase")
        if self.mass < 1.0:
            shares = children_by_mass(ranked, spend, self.temperature, self.mass)
        else:
            shares = children_by_node(ranked, spend, self.temperature)
        if leaves[0].depth <= self.floor_levels:
            shares = with_floor(ranked, shares)
        return Round.of(leaves, shares)


def children_by_node(ranked: Sequence[Node], total: int, temperature: float) -> dict[int, int]:
    """Children by node id, from ``allocate``; ``ranked``: by falling reward, none missing."""
    shares = allocate([node.reward or 0.0 for node in ranked], total, temperature)
    return {node.id: share for node, share in zip(ranked, shares, strict=True)}


def children_by_mass(
    ranked: Sequence[Node], total: int, temperature: float, mass: float
) -> dict[int, int]:
    """As ``children_by_node``, but twins share: a path's children are all at its lowest id."""
    counts = Counter(node.first for node in ranked)
    lowest = {node.first: node for node in reversed(ranked)}
    top = ranked[0].reward or 0.0
    weights = {
        node.id: counts[first] ** mass * exp(((node.reward or 0.0) - top) / temperature)
        for first, node in lowest.items()
    }
    order = sorted(weights, key=lambda node: (-weights[node], node))
    shares = dict(zip(order, deal([weights[node] for node in order], total), strict=True))
    return {node.id: shares.get(node.id, 0) for node in ranked}


def allocate(rewards: Sequence[float], total: int, temperature: float) -> list[int]:
    """Children for each reward (sorted, highest first), adding up to ``total`` exactly.

    ETS equation (1): W_i = ceil(N_i * exp(R_i/T) / sum over the not yet served k of exp(R_k/T)),
    N_i being the children that remain to be given.
    """
    return deal([exp((reward - rewards[0]) / temperature) for reward in rewards], total)


def deal(weights: Sequence[float], total: int) -> list[int]:
    """Deal ``total`` children by weight, in the order given: each gets its share of what is left,
    rounded up.

    In float64; 1e-9 is taken off before rounding up, so that an integer share with rounding noise
    on it stays that integer.
    """
    unserved = list(accumulate(reversed(weights)))[::-1]
    shares = []
    for weight, rest in zip(weights, unserved, strict=True):
        share = ceil(total * (weight / rest) - 1e-9) if total else 0
        shares.append(share)
        total -= share
    return shares
