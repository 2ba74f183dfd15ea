"""ETS: keep the leaves that are worth their KV, and run REBASE on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from search.clusters import PAPER_THRESHOLD, THRESHOLDS, cluster
from search.engine import EngineError
from search.leaf_selection import NODE_LIMIT, Program, optimum
from search.policies.policy import LevelPolicy, Round, Scores, by_reward, restarts_of
from search.policies.rebase import children_by_node
from search.policies.restarts import Restarts
from search.spec import CostName, SearchSpec, SolverName
from search.stats import step_blocks, token_blocks
from search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Ets(LevelPolicy):
    """Efficient tree search (ETS paper, sections 4 and B).

    REBASE weighs the open leaves; an integer program keeps those that are worth their share of the
    tree's KV and cover unlike steps (``search.leaf_selection``, objective (7)); REBASE then deals
    the whole remaining width to the kept ones. What it keeps depends on ``budget_weight`` (0: all,
    so that ETS is REBASE) and ``diversity_weight`` (0: steps are not compared, the paper's ETS-KV).

    Ties: in REBASE the lower id; between equal optima of a small program the lower ids, of a large
    one the solver's own, which is the same for the same tree. Leaves with the same token path share
    their KV, so they are kept or given up together. If the program is not solved within
    ``node_limit`` branch-and-bound nodes, all leaves are kept: the round is REBASE's, marked as
    ``fell_back``. It is REBASE's too if the embedder fails.
    """

    width: int
    temperature: float
    budget_weight: float = 1.0
    diversity_weight: float = 1.0
    cost: CostName = "nodes"
    threshold: float | None = None
    solver: SolverName = "highs"
    node_limit: int = NODE_LIMIT
    restarts: Restarts | None = None
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Ets:
        """The policy as the spec sets it."""
        return cls(
            spec.width,
            spec.reward_temperature,
            spec.budget_weight,
            spec.diversity_weight,
            spec.cost,
            spec.cluster_threshold,
            spec.solver,
            restarts=restarts_of(spec),
        )

    @classmethod
    def without_clusters(cls, spec: SearchSpec) -> Ets:
        """ETS-KV: the diversity weight is always 0; the spec's own is ignored."""
        return cls.from_spec(spec.model_copy(update={"diversity_weight": 0.0}))

    def suited_to(self, embedder: str | None) -> Ets:
        """Default to the embedder's threshold. Raises EngineError if one is needed and missing."""
        if not self.diversity_weight or not self.budget_weight:
            return self
        if embedder is None:
            dial = f"policy ets with diversity_weight {self.diversity_weight}"
            raise EngineError(f"the engine embeds nothing; {dial} needs embeddings")
        default = THRESHOLDS.get(embedder, PAPER_THRESHOLD)
        return self if self.threshold is not None else replace(self, threshold=default)

    def to_embed(self, tree: Tree) -> list[Node]:
        """The open leaves; none if their steps are equal or the weights make comparing useless."""
        leaves = list(tree.leaves())
        return leaves if self._compares(leaves) else []

    def uncompared(self, tree: Tree) -> Round | None:
        """REBASE's round: without its diversity term the program would keep twins."""
        return replace(self, budget_weight=0.0).plan(tree)

    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """Share ``spend`` among the leaves worth keeping, by their rewards."""
        ranked = by_reward(leaves, "ets")
        kept_ids = self._worth_keeping(tree, ranked, spend)
        kept_leaves = [node for node in ranked if kept_ids is None or node.id in kept_ids]
        shares = children_by_node(kept_leaves, spend, self.temperature)
        return Round.of(leaves, shares, fell_back=kept_ids is None)

    def _worth_keeping(self, tree: Tree, ranked: Sequence[Node], spend: int) -> set[int] | None:
        """The leaves that the program keeps; None if it was not solved."""
        if len(ranked) == 1 or not self.budget_weight:
            return {leaf.id for leaf in ranked}
        weights = children_by_node(ranked, spend, self.temperature)
        leaves = sorted(ranked, key=lambda leaf: leaf.id)
        blocks = (step_blocks if self.cost == "nodes" else token_blocks)(tree, leaves)
        program = Program.of(
            blocks,
            [weights[leaf.id] for leaf in leaves],
            self._clusters(leaves),
            self.budget_weight,
            self.diversity_weight,
        )
        ends = optimum(program, self.solver, self.node_limit)
        if ends is None:
            return None
        return {leaf.id for leaf, end in zip(leaves, blocks.ends, strict=True) if end in ends}

    def _clusters(self, leaves: Sequence[Node]) -> list[int]:
        """Each leaf's cluster by its last step; empty if there is nothing to compare."""
        if not self._compares(leaves):
            return []
        vectors = {}
        for leaf in leaves:
            if leaf.embedding is None:
                raise EngineError(f"node {leaf.id} has no embedding; policy ets needs one a step")
            vectors.setdefault(leaf.tokens, leaf.embedding)
        threshold = PAPER_THRESHOLD if self.threshold is None else self.threshold
        cluster_of = dict(zip(vectors, cluster(list(vectors.values()), threshold), strict=True))
        return [cluster_of[leaf.tokens] for leaf in leaves]

    def _compares(self, leaves: Sequence[Node]) -> bool:
        if not self.diversity_weight or not self.budget_weight:
            return False
        return len({leaf.tokens for leaf in leaves}) > 1
