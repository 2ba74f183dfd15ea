"""Where no step of a level is worth going on with, the tree starts again at the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search.policies.policy import Round
from search.spec import SearchSpec
from search.tree import ROOT, Node, Tree

ADAPTIVE_RESTARTS = 2


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often, and below which reward a level is hopeless.

    A level is hopeless if its best leaf and every finished trajectory have a reward below
    ``below``: what is drawn under it is mostly lost, and a first step that was not drawn costs one
    level. Its leaves are given up and the root gets as many new children as the level had to deal,
    but never more than ``most`` + 1 times ``width`` in all. Then the level is dealt as ever.

    Not in any of the papers. Backtracking searches do it node by node (``best_first``).
    """

    most: int = 0
    below: float = 0.3

    @classmethod
    def from_spec(cls, spec: SearchSpec) -> Restarts:
        """As the spec sets it; ``restarts`` defaults to ADAPTIVE_RESTARTS or to none."""
        default = ADAPTIVE_RESTARTS if spec.policy == "adaptive" else 0
        return cls(default if spec.restarts is None else spec.restarts, spec.hopeless_below)

    def round(self, tree: Tree, ranked: Sequence[Node], spend: int, width: int) -> Round | None:
        """The round that starts again, or None where there is hope or no place at the root.

        ``ranked``: the level's leaves, the best first, all with a reward.
        """
        if self._promising(ranked[0]) or not self.possible(tree, width):
            return None
        places = min(spend, self._room(tree, width))
        return Round({ROOT: places}, tuple(sorted(leaf.id for leaf in ranked)))

    def possible(self, tree: Tree, width: int) -> bool:
        """Whether this or a later level may start again; once it may not, it never may."""
        return self._room(tree, width) > 0 and not any(map(self._promising, tree.finished()))

    def _room(self, tree: Tree, width: int) -> int:
        """New children that the root may have; none where trees never start again."""
        return width * (1 + self.most) - len(tree[ROOT].children) if self.most else 0

    def _promising(self, node: Node) -> bool:
        return (node.reward or 0.0) >= self.below


NO_RESTARTS = Restarts()
"""As in the papers."""
