"""One model's KV cache: free slots, the radix tree of cached tokens, and the live sequences.

Every slot belongs to exactly one of the three; ``check`` verifies that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

import numpy as np

from runtime.embedded.cache_node import EMPTY
from runtime.embedded.choices import KvPolicy
from runtime.embedded.eviction import EVICTORS, VALUE_PARAMS, ValueParams
from runtime.embedded.radix_tree import RadixTree
from runtime.embedded.sequence import DraftChain, TokenSequence


class KvPool:
    """A stack of the free slot numbers in [0, capacity); ``available``: how many there are."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.available = capacity
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int64)

    def allocate(self, count: int) -> np.ndarray:
        """Take ``count`` slots, int64 (count,); the caller has checked that so many are free."""
        assert count <= self.available, "more slots taken than free"
        self.available -= count
        return self._stack[self.available : self.available + count][::-1].copy()

    def free(self, slots: np.ndarray) -> None:
        """Give slots back."""
        assert self.available + len(slots) <= self.capacity, "a slot was returned twice"
        self._stack[self.available : self.available + len(slots)] = slots
        self.available += len(slots)

    def free_slots(self) -> np.ndarray:
        """The free slots' numbers, for checks."""
        return self._stack[: self.available].copy()


class PrefixCache:
    """Manages the slots of a KV store of ``capacity`` tokens."""

    def __init__(
        self, capacity: int, policy: KvPolicy = "lru", values: ValueParams = VALUE_PARAMS
    ) -> None:
        self.pool = KvPool(capacity)
        self.radix = RadixTree()
        self.evictor = EVICTORS[policy](self.radix, capacity, values)
        self.sequences: set[TokenSequence] = set()
        self.budget = capacity
        """The most slots to be in use, up to the capacity: tokens that no branch reads are evicted
        to stay within it. Branches that read more may exceed it."""
        self.evicted_tokens = 0
        self.active_peak = 0
        self.reading_peak = 0
        self.peaks: dict[str, int] = {}
        self._private = Counter[str]()

    @property
    def capacity(self) -> int:
        """Token slots in all."""
        return self.pool.capacity

    @property
    def room(self) -> int:
        """Slots available without an eviction; below 0 if more than the budget is in use."""
        return self.pool.available - (self.capacity - self.budget)

    @property
    def available(self) -> int:
        """Slots that are free or can be freed by evicting."""
        if self.evictor.keeps_held:
            return self.unheld_room
        return self.pool.available + self.radix.size - self.radix.locked

    @property
    def unheld_room(self) -> int:
        """Slots that are free or hold tokens that no search holds."""
        return self.pool.available + self.radix.unheld

    @property
    def cached_tokens(self) -> int:
        """Evictable tokens that no search holds."""
        return self.radix.unheld

    @property
    def active_tokens(self) -> int:
        """Tokens that are held for running searches."""
        return self.capacity - self.pool.available - self.radix.unheld

    @property
    def reading_tokens(self) -> int:
        """Tokens that running sequences read or write; a part of ``active_tokens``."""
        return self.radix.locked + self._private.total()

    def tokens_of(self, tree: str) -> int:
        """Distinct tokens held for one search."""
        return self.radix.held_tokens[tree] + self._private[tree]

    def open(self, sequence: TokenSequence, tokens: np.ndarray, upto: int) -> None:
        """Start a sequence over ``tokens``, reusing the cached prefix of the first ``upto``."""
        sequence.begin(tokens, *self.radix.lock(sequence.tree, tokens[:upto]))
        self.sequences.add(sequence)

    def has_free(self, sequence: TokenSequence, count: int) -> bool:
        """Whether there are slots for the sequence's next ``count`` tokens without an eviction."""
        return sequence.computed + count - sequence.allocated <= self.room

    def reserve(self, sequence: TokenSequence, count: int) -> bool:
        """Give slots to the sequence's next ``count`` tokens, by evicting if necessary.

        False if there are too few. A preemptible sequence evicts nothing that a search holds.
        """
        new_slots = sequence.computed + count - sequence.allocated
        if new_slots <= 0:
            return True
        self._evict(new_slots - self.room, allow_held=not sequence.preemptible)
        if new_slots > self.pool.available:
            return False
        first, sequence.allocated = sequence.allocated, sequence.allocated + new_slots
        sequence.slots[first : sequence.allocated] = self.pool.allocate(new_slots)
        self._private[sequence.tree] += new_slots
        return True

    def keep_budget(self) -> None:
        """Evict tokens that no branch reads until the budget is met."""
        self._evict(-self.room, allow_held=True)

    def allocate_children(self, sequence: TokenSequence) -> None:
        """Give slots to the children of a sequence's draft; drop those for which none are free."""
        children = []
        for child in sequence.children:
            missing = len(child.tokens) - len(child.slots)
            orphan = child.parent is not None and child.parent not in children
            if missing > self.pool.available or orphan:
                self.free_children([child])
                continue
            child.slots = np.concatenate([child.slots, self.pool.allocate(missing)])
            children.append(child)
        sequence.children = children

    def free_children(self, children: Iterable[DraftChain]) -> None:
        """Free the slots of a draft's children."""
        for child in children:
            self.pool.free(child.slots)
            child.slots, child.computed = EMPTY, 0

    def share(self, sequence: TokenSequence) -> None:
        """Move what a sequence has computed into the radix tree; the sequence goes on below it."""
        first, last = sequence.shared, sequence.computed
        if first == last:
            return
        self._insert(sequence)
        anchor, sequence.slots[:last] = self.radix.lock(sequence.tree, sequence.tokens[:last])
        self.radix.unlock(sequence.anchor)
        self.radix.reindex_steps(sequence.tree, sequence.tokens[:last], sequence.cached_at_start)
        self._private[sequence.tree] -= last - first
        sequence.anchor, sequence.cached_at_start, sequence.shared = anchor, last, last

    def publish(self, sequence: TokenSequence) -> None:
        """End a sequence and move what it computed into the radix tree, held by its search."""
        last = sequence.computed
        self._insert(sequence)
        self.pool.free(sequence.slots[last : sequence.allocated])
        self.radix.reindex_steps(sequence.tree, sequence.tokens[:last], sequence.cached_at_start)
        self._end(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """End a sequence and free what it computed."""
        self.pool.free(sequence.private)
        self._end(sequence)

    def retain(self, tree: str, paths: Iterable[np.ndarray]) -> None:
        """Reduce what a search holds to these token paths and what its sequences read."""
        reading = [
            sequence.tokens[: sequence.shared]
            for sequence in self.sequences
            if sequence.tree == tree
        ]
        self.pool.free(self.radix.retain(tree, [*paths, *reading]))

    def release(self, tree: str, prompt: np.ndarray | None) -> None:
        """Release a search that has no sequences; only its prompt's tokens stay cached."""
        if prompt is not None:
            self.radix.keep(tree, prompt)
        self.evictor.remove_tree(tree)
        self.retain(tree, ())
        self.peaks.pop(tree, None)
        self._private.pop(tree, None)

    def note_peaks(self) -> None:
        """Update the peaks of what each running search holds, what all hold and what is read."""
        self.active_peak = max(self.active_peak, self.active_tokens)
        self.reading_peak = max(self.reading_peak, self.reading_tokens)
        for tree in {sequence.tree for sequence in self.sequences}:
            self.peaks[tree] = max(self.peaks.get(tree, 0), self.tokens_of(tree))

    def check(self, trees: Container[str] | None = None) -> None:
        """Raise AssertionError unless every slot is in one place and all counts agree.

        ``trees``: the running searches; no other search may hold anything.
        """
        if trees is not None:
            holding = {*+self.radix.held_tokens, *self.peaks, *+self._private}
            assert all(tree in trees for tree in holding), "a search that is over holds KV"
        self.radix.check()
        slots = [self.pool.free_slots(), *(node.slots for node in self.radix.nodes())]
        slots += [sequence.private for sequence in self.sequences]
        all_slots = np.sort(np.concatenate(slots))
        assert np.array_equal(all_slots, np.arange(self.capacity)), "a slot is lost or used twice"
        private = Counter[str]()
        locks = Counter[int]()
        for sequence in self.sequences:
            private[sequence.tree] += len(sequence.private)
            node = sequence.anchor
            while node.parent is not None:
                locks[node.serial] += 1
                node = node.parent
        assert +self._private == +private, "private tokens by search"
        assert {n.serial: n.locks for n in self.radix.nodes() if n.locks} == dict(locks), "locks"

    def _insert(self, sequence: TokenSequence) -> None:
        """Add what a sequence has computed to the radix tree; tokens that are cached already keep
        their slots, and the sequence's slots for them are freed."""
        new = slice(sequence.shared, sequence.computed)
        _, duplicates = self.radix.insert(
            sequence.anchor, sequence.tokens[new], sequence.slots[new], sequence.tree
        )
        self.pool.free(duplicates)

    def _evict(self, tokens: int, *, allow_held: bool) -> None:
        if tokens > 0:
            freed = self.evictor.evict(tokens, allow_held=allow_held)
            self.evicted_tokens += len(freed)
            self.pool.free(freed)

    def _end(self, sequence: TokenSequence) -> None:
        self.free_children(sequence.children)
        self._private[sequence.tree] -= sequence.allocated - sequence.shared
        self.radix.unlock(sequence.anchor)
        self.sequences.remove(sequence)
        sequence.live = False
