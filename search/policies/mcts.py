"""Monte Carlo tree search over steps: PUCT on the reward model's values."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from search.policies.policy import Round, Scores, remaining
from search.policies.visit_counts import (
    ExpansionBudget,
    VisitCounts,
    expansions,
    expansions_below,
    hand_out,
    heads,
)
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Node, NodeState, Tree

EXPLORATION = 1.25


@dataclass(frozen=True, slots=True)
class Mcts(ExpansionBudget):
    """Walks from the root to a node to grow, ``parallel`` walks at once; nothing is pruned.

    At every node a walk takes the child with the highest Q/N + c * P * sqrt(N_parent) / (1 + N),
    ties to the lower id. N counts the steps drawn at or below a node, Q sums their rewards (a step
    that died at birth counts with 0). Siblings are samples of the policy model: those that say the
    same are one move, for which the first stands, and P is their share of all (Hubert et al. 2021).
    Its twins never grow.

    A walk ends at an open leaf, or at an expanded node that may be *expanded again*: one that has
    been so fewer than sqrt(expansions at or below it) times (progressive widening; the second time
    needs 4 of them, the third 9). It does not go where nothing may grow; when nothing at all may,
    the root gets more children. An expansion is ``branch`` children. From the grown node the walk
    is played to its end, a step a round: the best child of an expansion is the next to grow, as
    long as none of its siblings has. Without this a tree of 64 expansions may finish nothing.

    Walks under way come first in a round, by falling reward, then new ones. Each is a virtual visit
    of its path, with reward 0, for the next; a node grows at most once a round. A round never draws
    more children than trajectories are still to finish, so the width holds. It is over when
    ``width`` have finished or ``expansions`` are spent: what is open then stays open and has no
    vote. Depth is the spec's ``max_depth``.
    """

    exploration: float = EXPLORATION
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Mcts:
        """The policy as the spec sets it."""
        return cls(*cls.of(spec), EXPLORATION if spec.exploration is None else spec.exploration)

    def plan(self, tree: Tree) -> Round | None:
        """Take as many walks as the round has room for."""
        visits = VisitCounts.of(tree, "mcts", lambda _: True)
        slots, width = self.room(tree)
        if slots <= 0 or width <= 0:
            return None
        may_grow = {node.id for node in self.frontier(tree)}
        most = min(slots, width)  # every node takes a child at least
        nodes = self._round_nodes(visits, may_grow, most)
        return Round(hand_out(nodes, self.branch, width))

    def frontier(self, tree: Tree) -> list[Node]:
        """The open leaves and what may be expanded again; without any, the root."""
        below = expansions_below(tree, self.branch)
        return [
            node
            for node in tree.nodes
            if node.state is NodeState.OPEN
            and node.first == node.id
            and self._may_grow(node, below[node.id])
        ] or [tree[ROOT]]

    def expansion_order(self, tree: Tree) -> list[Node]:
        """The next round's nodes, the walks under way that it has no room for, then the other nodes
        that may grow, by rising gap (``_gaps``).

        Each walk lowers the value of the nodes on its way: the node with the smallest gap to the
        best is next in turn.
        """
        visits = VisitCounts.of(tree, "mcts", lambda _: True)
        may_grow = {node.id for node in self.frontier(tree)}
        next_round = self._round_nodes(visits, may_grow, self.parallel)
        waiting_heads = heads(tree, self.branch)[self.parallel :]
        may_grow -= {node.id for node in waiting_heads}
        gaps = self._gaps(visits, may_grow)
        rest = sorted(may_grow, key=lambda node: (gaps[node], node))
        return next_round + waiting_heads + [tree[node] for node in rest]

    def stopped(self, tree: Tree) -> StopReason | None:
        """``width_spent`` if its expansions are spent."""
        return StopReason.WIDTH_SPENT if remaining(tree, self.width) > 0 else None

    def value(self, visits: VisitCounts, child: Node) -> float:
        """The PUCT value of walking on to ``child``."""
        tree = visits.tree
        parent = tree[child.parent]
        equal_siblings = sum(tree[sibling].tokens == child.tokens for sibling in parent.children)
        prior = equal_siblings / len(parent.children)
        reach = sqrt(visits.count[parent.id]) / (1 + visits.count[child.id])
        return visits.mean(child) + self.exploration * prior * reach

    def _may_grow(self, node: Node, below: int) -> bool:
        return not node.children or (expansions(node, self.branch) + 1) ** 2 <= below

    def _round_nodes(self, visits: VisitCounts, may_grow: set[int], slots: int) -> list[Node]:
        """The nodes of a round, removed from ``may_grow``; each is a visit for the next one."""
        nodes = heads(visits.tree, self.branch)[:slots]
        for node in nodes:
            may_grow.remove(node.id)
            visits.pass_through(node)
        while may_grow and len(nodes) < slots:
            node = self._walk(visits, may_grow)
            may_grow.remove(node.id)
            visits.pass_through(node)
            nodes.append(node)
        return nodes

    def _gaps(self, visits: VisitCounts, may_grow: set[int]) -> dict[int, float]:
        """For each node on the way to one that may grow, the largest amount by which it or an
        ancestor is worth less than the best sibling that leads to such a node."""
        tree = visits.tree
        path_ids = tree.above(tree[node] for node in may_grow)
        gaps = {ROOT: 0.0}
        for node in (ROOT, *sorted(path_ids)):
            values = {
                child: self.value(visits, tree[child])
                for child in tree[node].children
                if child in path_ids
            }
            best = max(values.values(), default=0.0)
            gaps |= {child: max(gaps[node], best - value) for child, value in values.items()}
        return gaps

    def _walk(self, visits: VisitCounts, may_grow: set[int]) -> Node:
        """Walk from the root to the first node that may grow."""
        tree = visits.tree
        path_ids = tree.above(tree[node] for node in may_grow)
        node = tree[ROOT]
        while node.id not in may_grow:
            children = [tree[child] for child in node.children if child in path_ids]
            node = min(children, key=lambda child: (-self.value(visits, child), child.id))
        return node
