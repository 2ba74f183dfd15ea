"""Adaptive: a few independent chains, and a tree only where they disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar

from search.policies.policy import Round, Scores, remaining, restarts_of
from search.policies.rebase import Rebase
from search.policies.restarts import Restarts
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Node, NodeState, Tree

RESTARTS = 2
ROUNDING = 1e-9
"""A share that misses its threshold only by rounding reaches it."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Draws ``chains`` independent chains; if the share ``agreement`` of them has one answer, the
    search ends. Else REBASE grows a tree with the remaining places, and the chains take part:
    their steps are candidates at every level beside the tree's own, without being drawn again, and
    their replies vote too.

    A chain that dies (an empty or looping step) or states no answer agrees with none, and its place
    is used up: the tree finishes ``width`` - ``chains`` trajectories. At the root it draws as many
    children as its places exceed the chains' open first steps, or none if these are enough. A
    chain's step that gets no child is skipped and stays open; a leaf of the tree is pruned. Ties:
    as in REBASE.

    Easy questions cost no more than their chains; hard ones get a tree, and votes that do not all
    descend from one step. (Aggarwal et al. 2023 stop sampling when samples agree; Snell et al.
    2024 spend by difficulty. Seeding a tree with these samples is our own.)
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

    @property
    def restarts(self) -> Restarts | None:
        """When its tree restarts at the root; None: never."""
        return self.tree_search.restarts

    def plan(self, tree: Tree) -> Round | None:
        """Plan as ``plan_knowing`` does without any answers."""
        return self.plan_knowing(tree, {})

    def plan_knowing(self, tree: Tree, answers: Mapping[str, Sequence[Node]]) -> Round | None:
        """The chains' next steps; once they end, None if they agree, else the tree's next level."""
        if not tree[ROOT].children:
            return Round({ROOT: self.chains})
        if self._depth(tree) is not None:
            return self._level(tree)
        leaves = list(tree.leaves())
        if leaves:
            return Round({leaf.id: 1 for leaf in leaves})
        return None if self._agreed(answers) else self._level(tree)

    def frontier(self, tree: Tree) -> list[Node]:
        """The tree's open leaves and the chains' open steps at their depth or below; at any depth
        while there is no tree, or while it may restart at the root."""
        again = self.restarts is not None and self.restarts.possible(tree, self.width)
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
        level = self.tree_search.deal(tree, self._candidates(tree, depth or 1), places)
        if level is None:
            return None
        return Round(level.expand, tuple(node for node in level.prune if not tree[node].children))

    def _candidates(self, tree: Tree, depth: int) -> list[Node]:
        """The open leaves and the chains' open steps at a depth, in id order."""
        return [node for node in self.frontier(tree) if node.depth == depth]

    def _places(self, tree: Tree) -> int:
        """How many trajectories the tree still has to finish."""
        finished_chains = sum(self._in_chain(node) for node in tree.finished())
        return remaining(tree, self.width) - (self.chains - finished_chains)

    def _depth(self, tree: Tree) -> int | None:
        """The depth of the tree's last level; None while there are only chains."""
        last = tree.nodes[-1]
        return None if self._in_chain(last) else last.depth

    def _in_chain(self, node: Node) -> bool:
        """Whether a node is the root or a step of a chain: its path begins with a chain's number
        and goes on with first children."""
        return node.id == ROOT or (node.path[0] < self.chains and not any(node.path[1:]))

    def _agreed(self, answers: Mapping[str, Sequence[Node]]) -> bool:
        """Whether enough chains have the same answer; a single chain never agrees."""
        largest = max(map(len, answers.values()), default=0)
        return largest > 1 and largest >= self.agreement * self.chains - ROUNDING
