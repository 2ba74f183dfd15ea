"""Restart a tree at the root when no step of a level is worth expanding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search.tree import ROOT, Node, Tree


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a tree may restart, and below which reward a level is hopeless.

    A level is hopeless if its best leaf, should it have one, and every finished trajectory have a
    reward below ``below``: what is drawn under it is mostly wasted, and a new first step costs only
    one level. Its leaves are given up and the root gets as many new children as the level had to
    deal, but never more than ``most`` + 1 times ``width`` in all. After that, levels are dealt as
    usual.

    Not in any of the papers. Backtracking searches do it node by node (``best_first``).
    """

    most: int
    below: float = 0.3

    @property
    def most_starts(self) -> int:
        """How many times at most a tree starts at the root. Restarts share ``most`` times the
        width; if trajectories have finished, what is left of it can be one more, smaller one."""
        return self.most + 2

    def places(self, tree: Tree, leaves: Sequence[Node], spend: int, width: int) -> int:
        """How many of ``spend`` children the root gets instead of a level's ``leaves``; 0 if there
        is hope, an unknown reward, or no room at the root."""
        hope = any(leaf.reward is None or self._promising(leaf) for leaf in leaves)
        return 0 if hope or not self.possible(tree, width) else min(spend, self._room(tree, width))

    def possible(self, tree: Tree, width: int) -> bool:
        """Whether this or a later level may restart; once False it stays False."""
        return self._room(tree, width) > 0 and not any(map(self._promising, tree.finished()))

    def _room(self, tree: Tree, width: int) -> int:
        """How many new children the root may still get."""
        return width * (1 + self.most) - len(tree[ROOT].children)

    def _promising(self, node: Node) -> bool:
        return (node.reward or 0.0) >= self.below
