"""Which leaf of a radix tree is worth least to searches, asked again and again.

The order is made once for what a search's move has weighed. Until the next move it is only added
to: by steps that end, and by what becomes a leaf as the leaves below it go.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvpolicy.block_table import BlockTable, EvictionKey
from kvpolicy.value import Floats
from runtime.embedded.cache_node import CacheNode, StepId
from runtime.embedded.radix_tree import RadixTree
from runtime.embedded.step_index import NO_STEPS


class EvictionCandidates:
    """Unlocked leaves of a radix tree in the order in which they go.

    First what nobody holds, by age, and what is held but no step ends at; then by the dearest of
    the steps that end there.
    """

    def __init__(self, radix: RadixTree, table: BlockTable) -> None:
        self._radix = radix
        self._table = table
        self._trees: list[str] = []
        self._tree = self._step = NO_STEPS
        self._key = _NO_KEYS
        self._left = 0
        self._late: list[tuple[EvictionKey, StepId]] = []
        self._bare = True
        self._outdated = True

    def outdate(self) -> None:
        """A search has begun, moved or ended: weights are others now."""
        self._outdated = True

    def add(self, step: StepId) -> None:
        """A step has ended, or has lost its place: it may be a leaf."""
        if not self._outdated:
            heapq.heappush(self._late, (self._table.eviction_key(*step), step))

    def lowest(self) -> tuple[bool, CacheNode] | None:
        """Whether a search is about to read it, and the leaf that is to go next; None if none may.

        Only when the order has come to its end it is made again: for what was locked in its turn.
        """
        ordered = self._outdated
        if ordered:
            self._order()
        found = self._stray() or self._valued()
        if found is None and not ordered and any(not leaf.locks for leaf in self._radix.leaves):
            self._order()
            found = self._stray() or self._valued()
        return found

    def evict(self, leaf: CacheNode, wanted: int) -> np.ndarray:
        """Free up to ``wanted`` slots of a leaf; what is a leaf then joins the order."""
        above = leaf.parent
        slots = self._radix.evict_tip(leaf, wanted)
        if above is not None and self._radix.is_leaf(above) and above.steps:
            step = max(above.steps, key=lambda step: self._table.eviction_key(*step))
            heapq.heappush(self._late, (self._table.eviction_key(*step), step))
        return slots

    def _stray(self) -> tuple[bool, CacheNode] | None:
        """What no search wants. Few leaves are such, so they are only looked for if need be."""
        if not (self._radix.unheld or self._bare):
            return None
        strays = [n for n in self._radix.leaves if not (n.locks or (n.holders and n.steps))]
        self._bare = any(node.holders for node in strays)
        if not strays:
            return None
        return False, min(strays, key=lambda node: (bool(node.holders), node.stamp, node.serial))

    def _valued(self) -> tuple[bool, CacheNode] | None:
        """The first leaf in order, which stays the first until it is evicted or read."""
        while (entry := self._first()) is not None:
            rank, step = entry
            node = self._radix.steps.node_of(step)
            if node is None or node.locks or not self._radix.is_leaf(node):
                self._skip(entry)
                continue
            if len(node.steps) > 1:
                dearest = max((self._table.eviction_key(*other), other) for other in node.steps)
                if dearest[0] > rank:
                    self._skip(entry)
                    heapq.heappush(self._late, dearest)
                    continue
            return rank[0], node
        return None

    def _first(self) -> tuple[EvictionKey, StepId] | None:
        """The next step, of those ordered at once and those added since."""
        late = self._late[0] if self._late else None
        if not self._left:
            return late
        at = self._left - 1
        tree, step = self._trees[self._tree[at]], int(self._step[at])
        rank = self._table.eviction_key_at(tree, step, float(self._key[at]))
        return late if late is not None and late[0] <= rank else (rank, (tree, step))

    def _skip(self, entry: tuple[EvictionKey, StepId]) -> None:
        """Take out what ``_first`` gave."""
        if self._late and self._late[0] is entry:
            heapq.heappop(self._late)
        else:
            self._left -= 1

    def _order(self) -> None:
        """Order all steps by ``BlockTable.eviction_key``, the lowest last.

        Among equals the later search and the higher id go first: so they are put in that order
        before a sort that keeps it.
        """
        self._late.clear()
        self._trees = list(self._table)
        steps, trees, keys = [NO_STEPS], [NO_STEPS], [_NO_KEYS]
        for index, name in reversed(list(enumerate(self._trees))):
            mine = self._radix.steps.filed(name)
            steps.append(mine[::-1])
            trees.append(np.full(len(mine), index))
            keys.append(self._table[name].weights_of(mine)[::-1])
        every = np.concatenate(keys)
        order = np.argsort(every, kind="stable")[::-1]
        self._key = every[order]
        self._step = np.concatenate(steps)[order]
        self._tree = np.concatenate(trees)[order]
        self._left = len(order)
        self._bare, self._outdated = True, False


_NO_KEYS: Floats = np.empty(0, dtype=np.float64)
