"""Which cached tokens are evicted first when room is short: by age, or by their worth to searches.

A step that has ended is filed in the radix tree's index, unless nothing that is held may go, and
under ``arborkv`` it is a block of ``kvpolicy.block_table`` too. A leaf is worth the most of the
blocks that end there, over all searches; what is evicted is computed again by the prefill that
comes before decoding. Order decides cost, never a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np

from kvpolicy.block_table import BlockTable
from kvpolicy.eviction_order import EvictionParams
from kvpolicy.value import UNFITTED, Theta, attention_shares
from runtime.embedded.cache_node import EMPTY, StepId
from runtime.embedded.eviction_candidates import EvictionCandidates
from runtime.embedded.radix_tree import RadixTree
from search.engine import Hint
from search.tree import ROOT

KvPolicy = Literal["full", "lru", "arborkv"]
"""The names of ``EVICTORS``."""

MARGIN = 0.02
"""Share of the capacity that is evicted beyond what is wanted, so that evictions are few."""
MOST_MARGIN = 32
"""Tokens that are evicted beyond at most: each costs a little, and no search waits for more."""
EVICTION_PARAMS = EvictionParams(distance_decay=0.0)
"""Best-first search returns to the best open node, however far: a decay by distance lost to lru."""


Attention = Callable[[np.ndarray], np.ndarray]
"""``KVStore.attention``: what the last token of a path pays to each, from the path's slots."""


class ValueParams(NamedTuple):
    """How ``arborkv`` values a block: the estimator's coefficients and equation (2)'s constants.

    Where nothing has been fitted the search's own value decides alone: what the other signals weigh
    against it is not known, and a wrong weight is worse than none. ``attends``: attention is read
    and told with the steps although the coefficients do not ask for it.
    """

    theta: Theta = UNFITTED.only("v")
    params: EvictionParams = EVICTION_PARAMS
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
            self._table.transition(tree, {}, [ROOT], ())
            self.radix.index_step((tree, ROOT), prompt)
            self._candidates.outdate()

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
                self._table.boundary(tree, node, above, tokens, confidence)
            alive = blocks.alive(node)
            if alive:
                self.radix.index_step((tree, node), path, (tree, parent))
                shares = self._attend((tree, node), len(path) - 1) if new else ()
            if not blocks.weights_current:
                self._candidates.outdate()
            if alive:
                self._candidates.add((tree, node))
        return shares

    def preempt_step(self, tree: str, node: int, path: np.ndarray) -> None:
        self.radix.index_step((tree, node), path)
        self._candidates.add((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        with self.timed():
            super().hint(tree, hint)
            self._table.transition(tree, hint.values, hint.active, hint.dead, hint.outlook)
            self._candidates.outdate()

    def remove_tree(self, tree: str) -> None:
        self._table.remove_tree(tree)
        self._candidates.outdate()
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
        """What the last token ``computed`` of a path, which drew its last, pays to the blocks.

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
            self._table.add_attention(tree, block, share, 1)
        return tuple(shares)


EVICTORS: Mapping[KvPolicy, type[Evictor]] = {
    "full": HoldingEvictor,
    "lru": Evictor,
    "arborkv": ValueEvictor,
}
