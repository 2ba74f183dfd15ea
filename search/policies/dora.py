"""DORA: shares children among directions of thought, however many leaves each one has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, floor, fsum
from typing import ClassVar

from search.clusters import uniqueness
from search.engine import EngineError
from search.policies.floor import with_floor
from search.policies.policy import LevelPolicy, Round, Scores, by_reward, restarts_of
from search.policies.restarts import Restarts
from search.spec import SearchSpec
from search.tree import ROOT, Node, Tree

NOISE = 1e-9
"""A quota that differs from a whole number only by rounding is that number."""


@dataclass(frozen=True, slots=True)
class Dora(LevelPolicy):
    """Direction-oriented resource allocation (Wang et al. 2025, arXiv 2506.15707).

    A leaf's quota is the softmax of its reward, exp(R_i / T), times its uniqueness: its own share
    of the softmax of its last step's cosine similarities, exp(1 / T_s) over the sum of
    exp(s_ij / T_s) over all leaves j. So k leaves with the same last step together get what one of
    them alone would get, and a direction is funded by how good it is, not by how many candidates
    it has. The paper's are T = 0.1 and T_s = 0.01, for BGE-M3 embeddings.

    The paper rounds every quota; here the children add up to the width: a leaf has the whole part
    of its quota, and the remainder goes to the largest fractions, of equal ones to the better
    reward, then to the lower id. A leaf without a child is pruned, down to ``floor_levels`` only
    if no child is left for it (``with_floor``). If the embedder fails, leaves with equal last
    steps are one direction.
    """

    width: int
    temperature: float
    similarity_temperature: float = 0.01
    floor_levels: int = 0
    embedded: bool = True
    restarts: Restarts | None = None
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Dora:
        """The policy as the spec sets it."""
        temperatures = spec.reward_temperature, spec.similarity_temperature
        restarts = restarts_of(spec)
        return cls(spec.width, *temperatures, spec.floor_levels, restarts=restarts)

    def suited_to(self, embedder: str | None) -> Dora:
        """Return this policy, which fits any embedder. Raises EngineError if there is none."""
        if embedder is None:
            raise EngineError("the engine embeds nothing; policy dora needs embeddings")
        return self

    def to_embed(self, tree: Tree) -> list[Node]:
        """The open leaves; none if their last steps are all equal."""
        leaves = list(tree.leaves())
        compares = len({leaf.tokens for leaf in leaves}) > 1
        return leaves if compares and leaves[0].id != ROOT else []

    def uncompared(self, tree: Tree) -> Round | None:
        """Plan without embeddings: leaves with equal last steps are one direction."""
        return replace(self, embedded=False).plan(tree)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Share ``spend`` among the leaves by their rewards and directions."""
        ranked = by_reward(leaves, "dora")
        top = ranked[0].reward or 0.0
        weights = [
            exp(((leaf.reward or 0.0) - top) / self.temperature) * unique
            for leaf, unique in zip(ranked, self._uniqueness(ranked), strict=True)
        ]
        pairs = zip(ranked, quotas(weights, spend), strict=True)
        shares = {leaf.id: share for leaf, share in pairs}
        if leaves[0].depth <= self.floor_levels:
            shares = with_floor(ranked, shares)
        return Round.of(leaves, shares)

    def _uniqueness(self, leaves: Sequence[Node]) -> list[float]:
        """Each leaf's share of its direction, in (0, 1]."""
        counts = Counter(leaf.tokens for leaf in leaves)
        if not self.embedded or len(counts) == 1:
            return [1 / counts[leaf.tokens] for leaf in leaves]
        vectors = []
        for leaf in leaves:
            if leaf.embedding is None:
                raise EngineError(f"node {leaf.id} has no embedding; policy dora needs one a step")
            vectors.append(leaf.embedding)
        return uniqueness(vectors, self.similarity_temperature)


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """Split ``total`` by the weights: whole parts first, then one each to the largest fractions.

    Fractions that differ only by rounding noise are equal; the earlier ones come first.
    """
    whole = fsum(weights)
    exact = [total * (weight / whole) for weight in weights]
    shares = [floor(quota + NOISE) for quota in exact]
    fractions = [round(quota - share, 9) for quota, share in zip(exact, shares, strict=True)]
    order = sorted(range(len(weights)), key=lambda i: (-fractions[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares
