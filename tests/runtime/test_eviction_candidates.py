"""The order in which leaves go, kept from trim to trim, against the same made from nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpolicy.block_table import BlockTable, EvictionKey
from kvpolicy.eviction_order import EvictionParams
from runtime.embedded.cache_node import CacheNode
from runtime.embedded.eviction_candidates import EvictionCandidates
from runtime.embedded.radix_tree import RadixTree
from search.tree import ROOT


class Growing:
    """Two random searches in one radix tree: steps close, values come, the focus moves."""

    def __init__(self, seed: int, params: EvictionParams) -> None:
        self.draw = random.Random(seed)
        self.radix, self.forest = RadixTree(), BlockTable(params=params)
        self.victims = EvictionCandidates(self.radix, self.forest)
        self.paths: dict[tuple[str, int], np.ndarray] = {}
        self.slots = iter(range(100_000))
        for tree in ("ash", "oak"):
            self.forest.add_tree(tree, 3)
            self.add(tree, ROOT, np.array([7, 8, 9], dtype=np.int64), None)

    def add(self, tree: str, node: int, path: np.ndarray, above: int | None) -> None:
        """A step has ended and is cached."""
        slots = np.array([next(self.slots) for _ in path], dtype=np.int64)
        self.radix.insert(self.radix.root_of(tree), path, slots, tree)
        self.radix.reindex_steps(tree, path, 0)
        self.paths[tree, node] = path
        if above is not None:
            self.forest.boundary(tree, node, above, len(path) - len(self.paths[tree, above]))
            if not self.forest[tree].weights_current:
                self.victims.outdate()
        self.radix.index_step((tree, node), path, None if above is None else (tree, above))
        self.victims.add((tree, node))

    def round(self, tree: str) -> None:
        """The search moves to some node and draws steps of few tokens there, often alike."""
        known = [node for name, node in self.paths if name == tree]
        leaf = self.draw.choice(known)
        values = {node: self.draw.random() for node in self.draw.sample(known, len(known) // 2)}
        self.forest.transition(tree, values, [leaf], [])
        self.victims.outdate()
        for _ in range(3):
            step = self.draw.choices(range(3), k=self.draw.randrange(1, 5))
            path = np.concatenate([self.paths[tree, leaf], np.array(step, dtype=np.int64)])
            self.add(tree, max(n for name, n in self.paths if name == tree) + 1, path, leaf)

    def worth(self, leaf: CacheNode) -> EvictionKey:
        """The dearest of the steps that end at a leaf, or were lifted to it."""
        return max(self.forest.eviction_key(*mark) for mark in leaf.steps)


@pytest.mark.parametrize("params", [EvictionParams(), EvictionParams(distance_decay=0.0)])
def test_the_lowest_leaf_goes_first(params: EvictionParams) -> None:
    """Whatever was closed, lifted or cut since the last move: never one while another is lower."""
    search = Growing(3, params)
    for turn in range(60):
        search.round(("ash", "oak")[turn % 2])
        for _ in range(search.draw.randrange(8)):
            found = search.victims.lowest()
            if found is None:
                break
            lowest = min(search.worth(leaf) for leaf in search.radix.leaves)
            assert search.worth(found[1]) == lowest
            assert found[0] == lowest[0]
            search.victims.evict(found[1], search.draw.randrange(1, 4))
            search.radix.check()


def test_a_locked_leaf_is_passed_over_and_comes_back() -> None:
    """What is being read stays; once it is not, it may go, without a move of any search."""
    search = Growing(1, EvictionParams())
    search.round("ash")
    locked = [search.radix.lock(tree, path)[0] for (tree, _), path in search.paths.items()]
    assert search.victims.lowest() is None
    for node in locked:
        search.radix.unlock(node)
    while (found := search.victims.lowest()) is not None:
        search.victims.evict(found[1], 100)
    assert search.radix.size == 0
