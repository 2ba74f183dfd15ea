"""Which cached tokens go first when room is short: by age, or by what they are worth to searches.

A step that has ended is a mark in the radix tree, unless nothing that is held may go, and under
``arborkv`` a block of ``kvpolicy.block_table`` too. A leaf is worth the most of the blocks that end
there, over all searches; what is trimmed is computed again by the prefill that comes before
decoding. Order decides cost, never a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from kvpolicy.block_table import BlockTable
from kvpolicy.eviction_order import EvictionParams
from kvpolicy.value import UNFITTED, Theta, attention_shares
from runtime.embedded.eviction_candidates import EvictionCandidates
from runtime.embedded.radix_tree import EMPTY, RadixTree
from runtime.embedded.step_index import StepId
from search.engine import Hint
from search.tree import ROOT

KvPolicy = Literal["full", "lru", "arborkv"]
"""``full``: nothing goes that a search holds. ``lru``: what was used longest ago goes first.
``arborkv``: what is worth least."""

MARGIN = 0.02
"""Share of the capacity that a trim frees beyond what is wanted, so that trims are few."""
MOST_MARGIN = 32
"""Tokens that it frees beyond at most: each costs a little, and no search waits for more."""
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
    """The KV policy of one radix tree: it hears what searches do and says what to give up."""

    def __init__(
        self,
        radix: RadixTree,
        policy: KvPolicy,
        capacity: int,
        worth: ValueParams = VALUE_PARAMS,
    ) -> None:
        """``capacity``: of the KV store, in tokens."""
        self.keeps_held = policy == "full"
        self.seconds = 0.0
        self.trims = 0
        self._radix = radix
        self._forest = BlockTable(worth.theta, worth.params) if policy == "arborkv" else None
        self.attends = policy == "arborkv" and (worth.attends or "a" in worth.theta.signals)
        self._attention: Attention | None = None
        self._victims = (
            EvictionCandidates(radix, self._forest) if self._forest is not None else None
        )
        self._margin = min(MOST_MARGIN, int(MARGIN * capacity))

    def listen(self, attention: Attention) -> None:
        """From now on each step's end says what it attends to."""
        self._attention = attention

    def begin(self, tree: str, prompt: np.ndarray) -> None:
        """A search's prompt, int64 ids; only the first one counts."""
        if self._forest is not None and tree not in self._forest:
            self._forest.add_tree(tree, len(prompt))
            self._forest.transition(tree, {}, [ROOT], ())
            self._radix.mark((tree, ROOT), prompt)
            self._moved()

    def close(
        self, tree: str, node: int, parent: int, path: np.ndarray, confidence: float | None = None
    ) -> tuple[float, ...]:
        """A step has ended; ``path``: token ids from the prompt's start to the step's end.

        ``confidence``: its boundary confidence u, None where it is not known. Returns what its end
        attends to, as ``search.engine.Step`` tells it.
        """
        if self._forest is None or self._victims is None:
            if not self.keeps_held:
                self._radix.mark((tree, node), path, (tree, parent))
            return ()
        before = time.perf_counter()
        shares: tuple[float, ...] = ()
        blocks = self._forest[tree]
        fresh = node not in blocks
        if fresh:
            above = parent if parent in blocks else ROOT
            tokens = max(1, len(path) - blocks.end_position(above))
            self._forest.boundary(tree, node, above, tokens, confidence)
        alive = blocks.alive(node)
        if alive:
            self._radix.mark((tree, node), path, (tree, parent))
            shares = self._attend(self._forest, (tree, node), len(path) - 1) if fresh else ()
        if not blocks.weights_current:
            self._moved()
        if alive:
            self._victims.join((tree, node))
        self.seconds += time.perf_counter() - before
        return shares

    def draws(self, tree: str, node: int, path: np.ndarray) -> None:
        """A step under way lost its place: its tokens so far will be read when it goes on."""
        if self._victims is not None:
            self._radix.mark((tree, node), path)
            self._victims.join((tree, node))

    def drop(self, tree: str, node: int) -> None:
        """A step ended the reply: nothing will be drawn from there."""
        self._radix.marks.remove((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        """A search moved on."""
        before = time.perf_counter()
        for node in hint.dead:
            self._radix.marks.remove((tree, node))
        if self._forest is not None:
            self._forest.transition(tree, hint.values, hint.active, hint.dead, hint.outlook)
            self._moved()
        self.seconds += time.perf_counter() - before

    def end(self, tree: str) -> None:
        """A search is over."""
        if self._forest is not None:
            self._forest.remove_tree(tree)
            self._moved()
        self._radix.marks.remove_all(tree)

    def trim(self, wanted: int, *, held: bool = True) -> np.ndarray:
        """Slots of at least ``wanted`` tokens, or of all that may go; ``held``: whether what a
        search holds may."""
        before = time.perf_counter()
        if self._victims is None:
            freed = self._radix.trim(wanted, held=held and not self.keeps_held)
        else:
            freed = self._trim_by_worth(wanted, self._victims, held)
        self.trims += 1
        self.seconds += time.perf_counter() - before
        return freed

    def _attend(self, forest: BlockTable, mark: StepId, computed: int) -> tuple[float, ...]:
        """What the last token ``computed`` of a path, which drew its last, pays to the blocks.

        The block that has just closed is among them, for its tokens before that one: a leaf has no
        other reader yet, and it is leaves that are put in order. None where KV has gone already.
        """
        if self._attention is None:
            return ()
        slots = self._radix.slots_of(mark)[:computed]
        if len(slots) < computed:
            return ()
        tree, node = mark
        blocks = forest[tree]
        chain = blocks.chain(node)
        shares = attention_shares(self._attention(slots), blocks.tokens[chain]).tolist()
        for block, share in zip(chain, shares, strict=False):
            forest.add_attention(tree, block, share, 1)
        return tuple(shares)

    def _trim_by_worth(self, wanted: int, victims: EvictionCandidates, held: bool) -> np.ndarray:
        """Once at it, some more of what no search is about to read goes as well."""
        freed, count = [EMPTY], 0
        while (found := victims.lowest()) is not None:
            read_next, leaf = found
            left = wanted - count + (self._margin if held and not read_next else 0)
            if left <= 0 or (leaf.holders and not held):
                break
            freed.append(victims.cut(leaf, left))
            count += len(freed[-1])
        return np.concatenate(freed)

    def _moved(self) -> None:
        if self._victims is not None:
            self._victims.outdate()
