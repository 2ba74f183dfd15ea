"""REBASE: every leaf gets children in proportion to the softmax of its reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp
from typing import ClassVar

from search.policies.policy import LevelPolicy, Round, Scores, by_reward
from search.spec import SearchSpec
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Rebase(LevelPolicy):
    """Balanced tree search by equation (1) of the ETS paper.

    Leaves are served by falling reward, equal rewards by rising id, so that a remainder goes to the
    lower id. A leaf that gets no child is pruned.
    """

    width: int
    temperature: float
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Rebase:
        """The policy as the spec sets it."""
        return cls(spec.width, spec.reward_temperature)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """The leaves by their rewards."""
        ranked = by_reward(leaves, "rebase")
        shares = children_by_node(ranked, spend, self.temperature)
        return Round(
            {node: n for node, n in shares.items() if n},
            tuple(sorted(node for node, n in shares.items() if not n)),
        )


def children_by_node(ranked: Sequence[Node], total: int, temperature: float) -> dict[int, int]:
    """Node id to its children by ``allocate``; ``ranked``: by falling reward, none missing."""
    shares = allocate([node.reward or 0.0 for node in ranked], total, temperature)
    return {node.id: share for node, share in zip(ranked, shares, strict=True)}


def allocate(rewards: Sequence[float], total: int, temperature: float) -> list[int]:
    """Children for each reward (sorted, highest first), adding up to ``total`` exactly.

    ETS equation (1): W_i = ceil(N_i * exp(R_i/T) / sum over the not yet served k of exp(R_k/T)),
    N_i being what is left to give. In float64; 1e-9 is taken off before rounding up, so that an
    integer share with rounding noise on it stays that integer.
    """
    weights = [exp((reward - rewards[0]) / temperature) for reward in rewards]
    unserved = list(accumulate(reversed(weights)))[::-1]
    shares = []
    for weight, rest in zip(weights, unserved, strict=True):
        share = ceil(total * (weight / rest) - 1e-9) if total else 0
        shares.append(share)
        total -= share
    return shares
