"""Which cached tokens are evicted first when room is short: by age, or by their worth to searches.

A step that has ended is filed in the radix tree's index, unless no held token may be evicted, and
under ``arborkv`` it is also a block of ``kvpolicy.block_table``. A leaf is worth the most of the
blocks that end there, over all searches. Evicted tokens are computed again by the prefill before
decoding goes on. The order changes cost, never a result.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvpolicy.block_table import BlockTable, EvictionKey
from kvpolicy.eviction_order import SERVING_PARAMS, EvictionParams
from kvpolicy.value import UNFITTED, Theta, attention_shares
from runtime.embedded.cache_node import EMPTY, CacheNode, StepId
from runtime.embedded.choices import KvPolicy
from runtime.embedded.radix_tree import RadixTree, oldest_first
from search.engine import Hint
from search.tree import ROOT

MARGIN = 0.02
"""Share of the capacity that is evicted beyond the need, so that evictions are rare."""
MOST_MARGIN = 32
"""Most tokens evicted beyond the need: each costs a little, and no search waits for more."""


Attention = Callable[[np.ndarray], np.ndarray]
"""``KVStore.attention``: from a path's slots, its last token's attention to each token."""


class ValueParams(NamedTuple):
    """How ``arborkv`` values a block: the estimator's coefficients and equation (2)'s constants.

    Where nothing has been fitted, only the search's own value counts: the right weights of the
    other signals are unknown, and wrong weights are worse than none. ``attends``: read attention
    and report it with the steps even if the coefficients do not use it.
    """

    theta: Theta = UNFITTED.only("v")
    params: EvictionParams = SERVING_PARAMS
    attends: bool = False


VALUE_PARAMS = ValueParams()


class Evictor:
    """``lru``: tokens that nobody holds are evicted first, then those used longest ago."""

    keeps_held = False
    """Whether tokens that a search holds are never evicted."""
    attends = False
    """Whether ``end_step`` reads what a step's last token attends to; see ``use_attention``."""

    def __init__(self, radix: RadixTree, capacity: int, values: ValueParams = VALUE_PARAMS) -> None:
        """``capacity``: the KV store's, in tokens."""
        self.seconds = 0.0
        self.evictions = 0
        self.radix = radix

    def use_attention(self, attention: Attention) -> None:
        """From now on read attention at the end of each step."""

    def add_tree(self, tree: str, prompt: np.ndarray) -> None:
        """Set a search's prompt, int64 ids; only the first call for a tree counts."""

    def end_step(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        """File a step that has ended; ``path``: token ids from the prompt's start to its end.

        ``confidence``: its boundary confidence u, None if unknown. Returns what its last token
        attends to, as in ``search.engine.Step``; empty if attention is not read.
        """
        self.radix.index_step((tree, node), path, (tree, parent))
        return ()

    def preempt_step(self, tree: str, node: int, path: np.ndarray) -> None:
        """File a step that was preempted: its tokens so far will be read when it goes on."""

    def remove_step(self, tree: str, node: int) -> None:
        """Forget a step that ended the reply or is dead: nothing goes on from it."""
        self.radix.steps.remove((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        """Take a search's move."""
        for node in hint.dead:
            self.remove_step(tree, node)

    def remove_tree(self, tree: str) -> None:
        """Forget a search that is over."""
        self.radix.steps.remove_tree(tree)

    def evict(self, tokens: int, *, allow_held: bool = True) -> np.ndarray:
        """Evict at least ``tokens`` tokens, or all that may be evicted; returns their slots.
        ``allow_held``: whether tokens that a search holds may be evicted."""
        with self.timed():
            self.evictions += 1
            return self.choose(tokens, allow_held and not self.keeps_held)

    def choose(self, tokens: int, allow_held: bool) -> np.ndarray:
        """Choose and evict tokens; arguments and result as in ``evict``."""
        return self.radix.evict(tokens, allow_held=allow_held)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent in the ``with`` block to ``seconds``."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


class HoldingEvictor(Evictor):
    """``full``: tokens that a search holds are never evicted; the others by age."""

    keeps_held = True

    def end_step(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        return ()


class ValueEvictor(Evictor):
    """``arborkv``: tokens that are worth least to the searches are evicted first."""

    def __init__(self, radix: RadixTree, capacity: int, values: ValueParams = VALUE_PARAMS) -> None:
        super().__init__(radix, capacity, values)
        self.attends = values.attends or "a" in values.theta.signals
        self._attention: Attention | None = None
        self._table = BlockTable(values.theta, values.params)
        self._candidates = EvictionCandidates(radix, self._table)
        self._margin = min(MOST_MARGIN, int(MARGIN * capacity))

    def use_attention(self, attention: Attention) -> None:
        self._attention = attention

    def add_tree(self, tree: str, prompt: np.ndarray) -> None:
        if tree not in self._table:
            self._table.add_tree(tree, len(prompt))
            self._table[tree].transition({}, [ROOT], ())
            self.radix.index_step((tree, ROOT), prompt)

    def end_step(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        with self.timed():
            shares: tuple[float, ...] = ()
            blocks = self._table[tree]
            new = node not in blocks
            if new:
                above = parent if parent in blocks else ROOT
                tokens = max(1, len(path) - blocks.end_position(above))
                blocks.add_block(node, above, tokens, confidence)
            if blocks.alive(node):
                self.radix.index_step((tree, node), path, (tree, parent))
                shares = self._attend((tree, node), len(path) - 1) if new else ()
                self._candidates.add((tree, node))
        return shares

    def preempt_step(self, tree: str, node: int, path: np.ndarray) -> None:
        self.radix.index_step((tree, node), path)
        self._candidates.add((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        with self.timed():
            super().hint(tree, hint)
            self._table[tree].transition(hint.values, hint.active, hint.dead, hint.outlook)

    def remove_tree(self, tree: str) -> None:
        self._table.remove_tree(tree)
        super().remove_tree(tree)

    def choose(self, tokens: int, allow_held: bool) -> np.ndarray:
        """As ``Evictor.choose``, but evicts a margin more of what no search will read soon."""
        freed, count = [EMPTY], 0
        while (lowest := self._candidates.lowest()) is not None:
            on_path, leaf = lowest
            remaining = tokens - count + (self._margin if allow_held and not on_path else 0)
            if remaining <= 0 or (leaf.holders and not allow_held):
                break
            freed.append(self._candidates.evict(leaf, remaining))
            count += len(freed[-1])
        return np.concatenate(freed)

    def _attend(self, step: StepId, computed: int) -> tuple[float, ...]:
        """The attention of the last of a path's first ``computed`` tokens to the path's blocks.

        The block that has just closed counts with its tokens before that one: a leaf has no other
        reader yet, and leaves are what is ordered. Empty if part of the KV is evicted already.
        """
        if self._attention is None:
            return ()
        slots = self.radix.slots_of(step)[:computed]
        if len(slots) < computed:
            return ()
        tree, node = step
        blocks = self._table[tree]
        chain = blocks.chain(node)
        shares = attention_shares(self._attention(slots), blocks.tokens[chain]).tolist()
        for block, share in zip(chain, shares, strict=False):
            blocks.add_attention(block, share, 1)
        return tuple(shares)


EVICTORS: Mapping[KvPolicy, type[Evictor]] = {
    "full": HoldingEvictor,
    "lru": Evictor,
    "arborkv": ValueEvictor,
}


class EvictionCandidates:
    """Unlocked leaves of a radix tree in the order in which they are evicted.

    First leaves that nobody holds, or that are held but end no step, by age; then by the highest
    key of the steps that end there. Steps are ordered once after each move of a search. Until the
    next move, only steps that end and nodes that become leaves are added.
    """

    def __init__(self, radix: RadixTree, table: BlockTable) -> None:
        self._radix = radix
        self._table = table
        self._trees: list[str] = []
        self._heap: list[tuple[EvictionKey, StepId]] = []
        self._unvalued = True
        """Whether there may be a held leaf at which no step ends."""

    @property
    def _current(self) -> bool:
        """Whether no search has begun, moved or ended since the steps were ordered."""
        table = self._table
        return self._trees == list(table) and all(table[t].weights_current for t in self._trees)

    def add(self, step: StepId) -> None:
        """Add a step that has ended or was preempted, because it may be a leaf."""
        if self._current:
            heapq.heappush(self._heap, (self._table.eviction_key(*step), step))

    def lowest(self) -> tuple[bool, CacheNode] | None:
        """Whether a search is about to read the leaf to evict next, and that leaf; None if none.

        When the order is exhausted it is made again, for leaves that were locked in their turn.
        """
        ordered = not self._current
        if ordered:
            self._order()
        lowest = self._unvalued_leaf() or self._valued_leaf()
        if lowest is None and not ordered and any(not leaf.locks for leaf in self._radix.leaves):
            self._order()
            lowest = self._unvalued_leaf() or self._valued_leaf()
        return lowest

    def evict(self, leaf: CacheNode, tokens: int) -> np.ndarray:
        """Free up to ``tokens`` slots of a leaf; a parent that becomes a leaf joins the order."""
        above = leaf.parent
        slots = self._radix.evict_tip(leaf, tokens)
        if above in self._radix.leaves and above.steps:
            heapq.heappush(self._heap, self._dearest(above))
        return slots

    def _dearest(self, node: CacheNode) -> tuple[EvictionKey, StepId]:
        return max((self._table.eviction_key(*step), step) for step in node.steps)

    def _unvalued_leaf(self) -> tuple[bool, CacheNode] | None:
        """The oldest leaf that nobody holds or that ends no step, if there may be one."""
        if not (self._radix.unheld or self._unvalued):
            return None
        unvalued = [n for n in self._radix.leaves if not (n.locks or (n.holders and n.steps))]
        self._unvalued = any(node.holders for node in unvalued)
        if not unvalued:
            return None
        return False, min(unvalued, key=oldest_first)

    def _valued_leaf(self) -> tuple[bool, CacheNode] | None:
        """The first leaf in order; it stays the first until it is evicted or locked."""
        while self._heap:
            key, step = self._heap[0]
            node = self._radix.steps.node_of(step)
            if node is None or node.locks or node not in self._radix.leaves:
                heapq.heappop(self._heap)
            elif len(node.steps) > 1 and (dearest := self._dearest(node))[0] > key:
                heapq.heapreplace(self._heap, dearest)
            else:
                return key[0], node
        return None

    def _order(self) -> None:
        """Order all steps by ``BlockTable.eviction_key``."""
        table = self._table
        self._trees, self._heap = list(table), []
        for tree in self._trees:
            nodes = self._radix.steps.filed(tree)
            weights = table[tree].weights_of(nodes).tolist()
            for node, weight in zip(nodes.tolist(), weights, strict=True):
                self._heap.append((table.eviction_key_at(tree, node, weight), (tree, node)))
        heapq.heapify(self._heap)
        self._unvalued = True
