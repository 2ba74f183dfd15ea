"""Best-first search with several active leaves, in the manner of Dynamic Parallel Tree Search."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, sqrt
from typing import ClassVar

from search.policies.policy import Round, Scores, remaining
from search.policies.visit_counts import ExpansionBudget, VisitCounts, hand_out, heads, leads
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Finish, Node, NodeState, Tree

EXPLORATION = 1 / sqrt(2)
ROUNDING = 1e-9
"""A reward that misses its threshold only by rounding reaches it."""


@dataclass(frozen=True, slots=True)
class BestFirst(ExpansionBudget):
    """Grows up to ``parallel`` open leaves a round, wherever they stand; nothing is pruned.

    A path *goes on*: once a leaf is expanded, the best of its children is next, as long as none of
    them has grown. It is followed if its reward reaches a share of the mean reward of all steps
    expanded so far: the share is ``early_stop`` where the expanded step led its own siblings (an
    exploited path, which stops early), ``deep_seek`` where it did not (an explored one, which is
    taken deep). Paths that go on come first, by falling reward. The rest of the round explores: it
    takes the open leaves with the highest Q/N + c * sqrt(1 + N_parent) * r / (1 + N). N is 1 and
    one more for each trajectory finished at or below, Q the sum of their rewards, r the leaf's own.
    All are computed from the tree at the round's start: a virtual visit would only raise the
    siblings of the leaf that was chosen. Ties go to the lower id.

    A leaf with the same steps as an earlier node is *old*: it is explored when no new one is left,
    for samples that its twin did not draw. (Small models repeat themselves; without this a search
    can be spent on one dead end that it reached in forty ways.) A leaf is expanded once, to
    ``branch`` children; when no leaf at all is left, the root is expanded once more.
    A round never draws more children than trajectories are still to finish, so the width holds. It
    is over when ``width`` have finished, when ``enough`` have ended by themselves and no new leaf
    has a higher reward than the best of them, or when ``expansions`` are spent: what is open then
    stays open and has no vote. Depth is the spec's ``max_depth``.

    Ding et al. 2025 (arXiv 2502.16235); their number of paths follows from free memory, here it is
    a parameter.
    """

    early_stop: float = 0.8
    deep_seek: float = 0.8
    enough: int = 5
    exploration: float = EXPLORATION
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> BestFirst:
        """The policy as the spec sets it."""
        return cls(
            *cls.of(spec),
            spec.early_stop,
            spec.deep_seek,
            spec.enough_answers,
            EXPLORATION if spec.exploration is None else spec.exploration,
        )

    def plan(self, tree: Tree) -> Round | None:
        """The paths that go on, then the leaves worth exploring."""
        visits = self._visits(tree)
        slots, width = self.room(tree)
        if slots <= 0 or width <= 0 or self._satisfied(tree):
            return None
        nodes = self._going_on(tree)[:slots]
        nodes += self._explored(tree, visits, nodes)[: slots - len(nodes)]
        return Round(hand_out(nodes, self.branch, width))

    def frontier(self, tree: Tree) -> list[Node]:
        """The open leaves; without any, the root."""
        return list(tree.leaves()) or [tree[ROOT]]

    def expansion_order(self, tree: Tree) -> list[Node]:
        """The paths that go on, then the leaves worth exploring."""
        path_heads = self._going_on(tree)
        return path_heads + self._explored(tree, self._visits(tree), path_heads)

    def stopped(self, tree: Tree) -> StopReason | None:
        """``answered`` if its answers are good enough, ``width_spent`` if its expansions are."""
        if remaining(tree, self.width) <= 0:
            return None
        return StopReason.ANSWERED if self._satisfied(tree) else StopReason.WIDTH_SPENT

    def _visits(self, tree: Tree) -> VisitCounts:
        return VisitCounts.of(tree, "best_first", lambda node: node.state is NodeState.FINISHED, 1)

    def _satisfied(self, tree: Tree) -> bool:
        rewards = [node.reward or 0.0 for node in tree.finished() if node.finish is Finish.END]
        if len(rewards) < self.enough:
            return False
        new_leaves = [leaf for leaf in tree.leaves() if leaf.first == leaf.id]
        return all((leaf.reward or 0.0) <= max(rewards) for leaf in new_leaves)

    def _going_on(self, tree: Tree) -> list[Node]:
        """The heads of paths that are worth following, the best first."""
        rewards = [node.reward or 0.0 for node in tree.nodes[1:] if node.children]
        mean = fsum(rewards) / len(rewards) if rewards else 0.0
        return [head for head in heads(tree, self.branch) if self._worth(tree, head, mean)]

    def _worth(self, tree: Tree, head: Node, mean: float) -> bool:
        """Whether a path is followed to ``head``, by the mean reward of what was expanded."""
        share = self.early_stop if leads(tree, tree[head.parent]) else self.deep_seek
        return (head.reward or 0.0) >= share * mean - ROUNDING

    def _explored(self, tree: Tree, visits: VisitCounts, path_heads: list[Node]) -> list[Node]:
        """The leaves other than ``path_heads``: new ones first, then by the formula above."""
        head_ids = {node.id for node in path_heads}
        leaves = [node for node in self.frontier(tree) if node.id not in head_ids]
        return sorted(
            leaves,
            key=lambda leaf: (leaf.first != leaf.id, -self.score(visits, leaf), leaf.id),
        )

    def score(self, visits: VisitCounts, leaf: Node) -> float:
        """The value of exploring an open leaf; 0 for the root, which has no rival."""
        if leaf.id == ROOT:
            return 0.0
        reach = sqrt(1 + visits.count[leaf.parent]) / (1 + visits.count[leaf.id])
        return visits.mean(leaf) + self.exploration * reach * (leaf.reward or 0.0)
