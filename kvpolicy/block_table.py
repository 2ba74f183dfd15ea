"""All searches' blocks under one budget: what happens to them, and which are evicted first.

Only three events cause work: a *boundary* (a block closes), a *transition* (a search's active
leaves change) and *pressure* (memory runs short, and the caller evicts by ``eviction_key``). The
cache recognises blocks that several trees share, and gives a shared block the highest of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvpolicy.eviction_order import EvictionParams
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, Theta

EvictionKey = tuple[bool, float, int, int]
"""On an active path, weight, minus the tree's number, minus the node's id. The lowest is evicted
first."""


class BlockTable:
    """The blocks of all running searches by tree name, in order of arrival."""

    def __init__(self, theta: Theta = UNFITTED, params: EvictionParams | None = None) -> None:
        self._table = theta.table()
        self._params = params or EvictionParams()
        self._trees: dict[str, TreeBlocks] = {}
        self._number: dict[str, int] = {}
        self._arrivals = 0

    def __contains__(self, tree: str) -> bool:
        return tree in self._trees

    def __getitem__(self, tree: str) -> TreeBlocks:
        return self._trees[tree]

    def __iter__(self) -> Iterator[str]:
        """The trees' names in order of arrival."""
        return iter(self._trees)

    def add_tree(self, tree: str, prompt_tokens: int) -> None:
        """Add a search that begins, under a name that no other has; its prompt is block 0."""
        self._arrivals += 1
        self._number[tree] = self._arrivals
        self._trees[tree] = TreeBlocks(prompt_tokens, self._table, self._params)

    def remove_tree(self, tree: str) -> None:
        """Forget a search that has ended; an unknown name is ignored."""
        self._trees.pop(tree, None)
        self._number.pop(tree, None)

    def eviction_key(self, tree: str, node: int) -> EvictionKey:
        """The key by which blocks are evicted, the lowest first.

        The search is about to need the blocks on its active path, whatever their value: among
        those, later trees and higher ids go first, because they are needed last. A node without a
        block is a step that is still being decoded: it counts as on the path.
        """
        blocks = self._trees.get(tree)
        if blocks is None or node not in blocks:
            return self.eviction_key_at(tree, node, math.inf)
        on_path, weight = blocks.path_and_weight(node)
        return self.eviction_key_at(tree, node, math.inf if on_path else weight)

    def eviction_key_at(self, tree: str, node: int, weight: float) -> EvictionKey:
        """``eviction_key`` of a block whose ``weight`` comes from ``TreeBlocks.weights_of``."""
        ahead = weight == math.inf
        return ahead, 0.0 if ahead else weight, -self._number.get(tree, 0), -node


def confidence_of_entropy(entropy: float, vocab: int) -> float:
    """Equation (1) from an ``entropy`` in nats: u = 1 - H / log|V| in [0, 1]; ``vocab`` is at least
    2 tokens."""
    return min(max(1.0 - entropy / math.log(vocab), 0.0), 1.0)
