"""Statistics for backtracking policies: how often a node was visited, with which rewards.

Everything is counted anew from the tree at every plan, in whole 1e-4 of reward, so that equal trees
have equal statistics to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from search.engine import RewardMissing
from search.policies.policy import remaining
from search.spec import SearchSpec
from search.tree import ROOT, UNITS, Node, NodeState, Tree


@dataclass(frozen=True, slots=True)
class ExpansionBudget:
    """Bounds of a backtracking search: ``width`` trajectories, ``expansions`` of ``branch``
    children each, ``parallel`` of them a round."""

    width: int
    branch: int = 3
    parallel: int = 4
    expansions: int = 64

    @staticmethod
    def of(spec: SearchSpec) -> tuple[int, int, int, int]:
        """These four fields of a spec, in this order."""
        return spec.width, spec.branch, spec.parallel, spec.expansions

    def room(self, tree: Tree) -> tuple[int, int]:
        """Nodes that the next round may expand, and children that it may give them in all."""
        budget = self.expansions - expansions_below(tree, self.branch)[ROOT]
        return min(self.parallel, budget), remaining(tree, self.width)


@dataclass(slots=True)
class VisitCounts:
    """N and Q of every node, by id.

    ``count``: visits at or below; ``units``: their rewards, in 1e-4.
    """

    tree: Tree
    count: list[int]
    units: list[int]

    @classmethod
    def of(
        cls, tree: Tree, policy: str, counts: Callable[[Node], bool], start: int = 0
    ) -> VisitCounts:
        """Each node that ``counts`` is a visit; every node has ``start`` more, of reward 0.

        A step that died at birth has no reward and counts with 0. Raises RewardMissing if any
        other step has none.
        """
        count, units = [start] * len(tree), [0] * len(tree)
        for node in reversed(tree.nodes[1:]):
            if node.reward is None and node.state is not NodeState.PRUNED:
                need = f"policy {policy} needs one a step"
                raise RewardMissing(f"node {node.id} has no reward; {need}")
            if counts(node):
                count[node.id] += 1
                units[node.id] += round((node.reward or 0.0) * UNITS)
            count[node.parent] += count[node.id] - start
            units[node.parent] += units[node.id]
        return cls(tree, count, units)

    def mean(self, node: Node) -> float:
        """Q/N."""
        return self.units[node.id] / UNITS / self.count[node.id]

    def pass_through(self, node: Node) -> None:
        """Add a virtual visit of reward 0 to ``node`` and its ancestors, for this round."""
        self.count[node.id] += 1
        for step in self.tree.chain(node.id):
            self.count[step.parent] += 1


def expansions(node: Node, branch: int) -> int:
    """How often a node was expanded. An expansion that the width cut short counts as one."""
    return -(-len(node.children) // branch)


def expansions_below(tree: Tree, branch: int) -> list[int]:
    """Expansions at or below each node, by id."""
    counts = [expansions(node, branch) for node in tree.nodes]
    for node in reversed(tree.nodes[1:]):
        counts[node.parent] += counts[node.id]
    return counts


def hand_out(nodes: Iterable[Node], branch: int, width: int) -> Mapping[int, int]:
    """Give each node in turn ``branch`` children, up to ``width`` in all: each might finish.

    A node whose last expansion was cut short gets only the missing children.
    """
    shares: dict[int, int] = {}
    for node in nodes:
        share = min(branch - len(node.children) % branch, width)
        if share:
            shares[node.id] = share
            width -= share
    return shares


def heads(tree: Tree, branch: int) -> list[Node]:
    """Where paths go on: the best child of each node's last expansion, if none of these has grown.

    Only a child with new steps can be a head. A path whose best child finished has no head. Sorted
    by falling reward, equal rewards by rising id.
    """
    best_heads: list[Node] = []
    for node in tree.nodes:
        last = node.children[(expansions(node, branch) - 1) * branch :]
        best = best_of([tree[child] for child in last if tree[child].first == child])
        has_grown = any(tree[child].children for child in last)
        if best is not None and best.state is NodeState.OPEN and not has_grown:
            best_heads.append(best)
    return sorted(best_heads, key=lambda head: (-(head.reward or 0.0), head.id))


def best_of(nodes: Sequence[Node]) -> Node | None:
    """The node with the highest reward, the lower id among equals; None if none has a reward."""
    scored_nodes = [node for node in nodes if node.reward is not None]
    return min(scored_nodes, key=lambda node: (-(node.reward or 0.0), node.id), default=None)


def leads(tree: Tree, node: Node) -> bool:
    """Whether ``node`` is the best child of its parent; True for the root."""
    siblings = tree[node.parent].children
    return node.id == ROOT or best_of([tree[child] for child in siblings]) is node
