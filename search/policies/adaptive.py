"""Adaptive: a few independent chains, and a tree only where they disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar

from search.policies.policy import Round, Scores, remaining, restarts_of
from search.policies.rebase import Rebase
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Node, NodeState, Tree

RESTARTS = 2
ROUNDING = 1e-9
"""A share that equals its threshold but for rounding reaches it."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """First ``chains`` independent chains; if the share ``agreement`` of them has one answer, that
    is all. Else REBASE grows a tree with the places that are left, and the chains take part: their
    steps are candidates at every level beside the tree's own, without having to be drawn again, and
    their ends vote along.

    A chain that dies (an empty or looping step) or states no answer agrees with nobody, and its
    place is spent: the tree finishes ``width`` - ``chains`` trajectories. At the root it draws so
    many children that with the chains' open first steps there is one for each of its places, or
    none if these are enough. A chain's step that gets no child is passed over and stays open; a
    leaf of the tree is pruned. Ties: REBASE's.

    Easy questions cost as much as their chains; what is hard has a tree, and votes that do not all
    descend from one step. (Aggarwal et al. 2023 stop sampling where samples agree; Snell et al.
    2024 spend by difficulty. To go on with a tree that these samples seed is ours.)
    """

    width: int
    chains: int
    agreement: float
    tree_search: Rebase
    scores: ClassVar[Scores] = Scores.ALL

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Adaptive:
        """The policy as the spec sets it; ``chains`` defaults to the rounded-up root of width,
        ``restarts`` to RESTARTS."""
        chains = min(spec.chains or isqrt(spec.width - 1) + 1, spec.width)
        tree_search = replace(Rebase.from_spec(spec), restarts=restarts_of(spec, RESTARTS))
        return cls(spec.width, chains, spec.agreement, tree_search)

    def plan(self, tree: Tree) -> Round | None:
        """As ``plan_knowing`` where no answers are known."""
        return self.plan_knowing(tree, {})

    def plan_knowing(self, tree: Tree, answers: Mapping[str, Sequence[Node]]) -> Round | None:
        """The chains' next steps; once they are over, nothing if they agree, else a level."""
        if not tree[ROOT].children:
            return Round({ROOT: self.chains})
        if self._depth(tree) is not None:
            return self._level(tree)
        leaves = list(tree.leaves())
        if leaves:
            return Round({leaf.id: 1 for leaf in leaves})
        return None if self._agreed(answers) else self._level(tree)

    def frontier(self, tree: Tree) -> list[Node]:
        """The tree's open leaves and the chains' steps beside and below them; before there is a
        tree, and as long as it may start again, all that is open."""
        restarts = self.tree_search.restarts
        again = restarts is not None and restarts.possible(tree, self.width)
        depth = 0 if again else self._depth(tree) or 0
        return [
            node
            for node in tree.nodes
            if node.state is NodeState.OPEN
            and node.depth >= depth
            and (not node.children or self._in_chain(node))
        ]

    def stopped(self, tree: Tree) -> StopReason | None:
        """``answered`` if the chains agreed, so that there is no tree."""
        agreed = self._depth(tree) is None and self._places(tree) > 0
        return StopReason.ANSWERED if agreed else None

    def _level(self, tree: Tree) -> Round | None:
        """The next level of the tree; None if it is complete."""
        places, depth = self._places(tree), self._depth(tree)
        if places <= 0:
            return None
        if depth is None:
            new_places = places - len(self._candidates(tree, 1))
            if new_places > 0:
                return Round({ROOT: new_places})
        candidates = self._candidates(tree, depth or 1)
        if not candidates:
            return None
        level = self.tree_search.deal(tree, candidates, places)
        return Round(level.expand, tuple(node for node in level.prune if not tree[node].children))

    def _candidates(self, tree: Tree, depth: int) -> list[Node]:
        """The open leaves and the chains' open steps at a depth, in id order."""
        return [node for node in self.frontier(tree) if node.depth == depth]

    def _places(self, tree: Tree) -> int:
        """Trajectories that the tree is still to finish."""
        finished_chains = sum(self._in_chain(node) for node in tree.finished())
        return remaining(tree, self.width) - (self.chains - finished_chains)

    def _depth(self, tree: Tree) -> int | None:
        """The depth of the tree's last level; None as long as there are chains alone."""
        last = tree.nodes[-1]
        return None if self._in_chain(last) else last.depth

    def _in_chain(self, node: Node) -> bool:
        """Whether a node is the root or a step of a chain: its path begins with a chain's number
        and goes on with first children."""
        return node.id == ROOT or (node.path[0] < self.chains and not any(node.path[1:]))

    def _agreed(self, answers: Mapping[str, Sequence[Node]]) -> bool:
        """Whether enough chains have one answer; nobody agrees with a single one."""
        largest = max(map(len, answers.values()), default=0)
        return largest > 1 and largest >= self.agreement * self.chains - ROUNDING
