"""Which cached tokens are evicted first when room is short: by age, or by their worth to searches.

A step that has ended is filed in the radix tree's index, unless nothing that is held may go, and
under ``arborkv`` it is a block of ``kvpolicy.block_table`` too. A leaf is worth the most of the
blocks that end there, over all searches; what is evicted is computed again by the prefill that
comes before decoding. Order decides cost, never a result.
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
"""Share of the capacity that is evicted beyond what is wanted, so that evictions are few."""
MOST_MARGIN = 32
"""Tokens that are evicted beyond at most: each costs a little, and no search waits for more."""


Attention = Callable[[np.ndarray], np.ndarray]
"""``KVStore.attention``: what the last token of a path pays to each, from the path's slots."""


class ValueParams(NamedTuple):
    """How ``arborkv`` values a block: the estimator's coefficients and equation (2)'s constants.

    Where nothing has been fitted the search's own value decides alone: what the other signals weigh
    against it is not known, and a wrong weight is worse than none. ``attends``: attention is read
    and reported with the steps although the coefficients do not ask for it.
    """

    theta: Theta = UNFITTED.only("v")
    params: EvictionParams = SERVING_PARAMS
    attends: bool = False


VALUE_PARAMS = ValueParams()


class Evictor:
    """``lru``: what nobody holds goes first, then what was used longest ago."""

    keeps_held = False
    """Nothing goes that a search holds."""
    attends = False
    """Steps say what their ends attend to; see ``use_attention``."""

    def __init__(self, radix: RadixTree, capacity: int, values: ValueParams = VALUE_PARAMS) -> None:
        """``capacity``: of the KV store, in tokens."""
        self.seconds = 0.0
        self.evictions = 0
        self.radix = radix

    def use_attention(self, attention: Attention) -> None:
        """From now on each step's end says what it attends to."""

    def add_tree(self, tree: str, prompt: np.ndarray) -> None:
        """A search's prompt, int64 ids; only the first one counts."""

    def end_step(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        """A step has ended; ``path``: token ids from the prompt's start to the step's end.

        ``confidence``: its boundary confidence u, None where it is not known. Returns what its end
        attends to, as ``search.engine.Step`` tells it.
        """
        self.radix.index_step((tree, node), path, (tree, parent))
        return ()

    def preempt_step(self, tree: str, node: int, path: np.ndarray) -> None:
        """A step was preempted: its tokens so far will be read when it goes on."""

    def remove_step(self, tree: str, node: int) -> None:
        """A step ended the reply, or is dead: nothing goes on from there."""
        self.radix.steps.remove((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        """A search moved on."""
        for node in hint.dead:
            self.remove_step(tree, node)

    def remove_tree(self, tree: str) -> None:
        """A search is over."""
        self.radix.steps.remove_tree(tree)

    def evict(self, wanted: int, *, held: bool = True) -> np.ndarray:
        """Slots of at least ``wanted`` tokens, or of all that may go; ``held``: whether what a
        search holds may."""
        with self.timed():
            self.evictions += 1
            return self.choose(wanted, held and not self.keeps_held)

    def choose(self, wanted: int, held: bool) -> np.ndarray:
        """Evict; arguments and result as of ``evict``."""
        return self.radix.evict(wanted, held=held)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is done within in ``seconds``."""
        before = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - before


class HoldingEvictor(Evictor):
    """``full``: nothing goes that a search holds; the rest by age."""

    keeps_held = True

    def end_step(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        return ()


class ValueEvictor(Evictor):
    """``arborkv``: what is worth least to the searches goes first."""

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

    def choose(self, wanted: int, held: bool) -> np.ndarray:
        """Once at it, some more of what no search is about to read goes as well."""
        freed, count = [EMPTY], 0
        while (lowest := self._candidates.lowest()) is not None:
            read_next, leaf = lowest
            left = wanted - count + (self._margin if held and not read_next else 0)
            if left <= 0 or (leaf.holders and not held):
                break
            freed.append(self._candidates.evict(leaf, left))
            count += len(freed[-1])
        return np.concatenate(freed)

    def _attend(self, step: StepId, computed: int) -> tuple[float, ...]:
        """What the last token ``computed`` of a path, which was sampled last, pays to the blocks.

        The block that has just closed is among them, for its tokens before that one: a leaf has no
        other reader yet, and it is leaves that are put in order. None where KV has gone already.
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
    """Unlocked leaves of a radix tree in the order in which they go.

    First what nobody holds, by age, and what is held but no step ends at; then by the dearest of
    the steps that end there. The order of steps is made once for what a search's move has weighed.
    Until the next move it is only added to: by steps that end, and by what becomes a leaf.
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
        """Whether no search has begun, moved or ended since leaves were ordered."""
        table = self._table
        return self._trees == list(table) and all(table[t].weights_current for t in self._trees)

    def add(self, step: StepId) -> None:
        """A step has ended, or was preempted: it may be a leaf."""
        if self._current:
            heapq.heappush(self._heap, (self._table.eviction_key(*step), step))

    def lowest(self) -> tuple[bool, CacheNode] | None:
        """Whether a search is about to read it, and the leaf that is to go next; None if none may.

        An order that has come to its end is made again: for what was locked in its turn.
        """
        ordered = not self._current
        if ordered:
            self._order()
        lowest = self._unvalued_leaf() or self._valued_leaf()
        if lowest is None and not ordered and any(not leaf.locks for leaf in self._radix.leaves):
            self._order()
            lowest = self._unvalued_leaf() or self._valued_leaf()
        return lowest

    def evict(self, leaf: CacheNode, wanted: int) -> np.ndarray:
        """Free up to ``wanted`` slots of a leaf; what is a leaf then joins the order."""
        above = leaf.parent
        slots = self._radix.evict_tip(leaf, wanted)
        if above in self._radix.leaves and above.steps:
            heapq.heappush(self._heap, self._dearest(above))
        return slots

    def _dearest(self, node: CacheNode) -> tuple[EvictionKey, StepId]:
        return max((self._table.eviction_key(*step), step) for step in node.steps)

    def _unvalued_leaf(self) -> tuple[bool, CacheNode] | None:
        """What no search wants. Few leaves are such, so they are only looked for if need be."""
        if not (self._radix.unheld or self._unvalued):
            return None
        unvalued = [n for n in self._radix.leaves if not (n.locks or (n.holders and n.steps))]
        self._unvalued = any(node.holders for node in unvalued)
        if not unvalued:
            return None
        return False, min(unvalued, key=oldest_first)

    def _valued_leaf(self) -> tuple[bool, CacheNode] | None:
        """The first leaf in order, which stays the first until it is evicted or read."""
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
