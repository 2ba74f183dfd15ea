"""One model's KV cache: free slots, the radix tree of cached tokens, and the lanes under way.

Every slot is in exactly one of the three; ``check`` proves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

import numpy as np

from runtime.embedded.cache_node import EMPTY
from runtime.embedded.draft_tree import DraftBranch
from runtime.embedded.eviction import EVICTORS, VALUE_PARAMS, KvPolicy, ValueParams
from runtime.embedded.kv_pool import KvPool
from runtime.embedded.radix_tree import RadixTree
from runtime.embedded.sequence import TokenSequence


class PrefixCache:
    """The slots of a KV store with ``capacity`` token slots."""

    def __init__(
        self, capacity: int, policy: KvPolicy = "lru", values: ValueParams = VALUE_PARAMS
    ) -> None:
        self.pool = KvPool(capacity)
        self.radix = RadixTree()
        self.evictor = EVICTORS[policy](self.radix, capacity, values)
        self.lanes: set[TokenSequence] = set()
        self.budget = capacity
        """Slots in use from which on what no branch reads is given up for every further one: at
        most the capacity, and less than what branches read if they read more."""
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
        """Slots to be had without an eviction; below 0 where more than the budget is in use."""
        return self.pool.available - (self.capacity - self.budget)

    @property
    def available(self) -> int:
        """Slots that are free or can be freed by evicting."""
        if self.evictor.keeps_held:
            return self.pool.available + self.radix.unheld
        return self.pool.available + self.radix.size - self.radix.locked

    @property
    def spare_room(self) -> int:
        """Slots that are free or that no search holds."""
        return self.pool.available + self.radix.unheld

    @property
    def cached_tokens(self) -> int:
        """Evictable tokens that no search holds."""
        return self.radix.unheld

    @property
    def active_tokens(self) -> int:
        """Tokens held for searches in flight."""
        return self.capacity - self.pool.available - self.radix.unheld

    @property
    def reading_tokens(self) -> int:
        """Of these, what running branches read or write."""
        return self.radix.locked + self._private.total()

    def tokens_of(self, tree: str) -> int:
        """Unique tokens held for one search."""
        return self.radix.held_tokens[tree] + self._private[tree]

    def open(self, sequence: TokenSequence, tokens: np.ndarray, upto: int) -> None:
        """Start a sequence over ``tokens`` that reuses what is cached of the first ``upto``."""
        sequence.begin(tokens, *self.radix.lock(sequence.tree, tokens[:upto]))
        self.lanes.add(sequence)

    def has_free(self, lane: TokenSequence, count: int) -> bool:
        """Whether the lane's next ``count`` tokens find slots without an eviction."""
        return lane.computed + count - lane.allocated <= self.room

    def reserve(self, lane: TokenSequence, count: int) -> bool:
        """Give slots to the lane's next ``count`` tokens, by evicting if need be.

        False if there are not as many. For a spare lane nothing goes that a search holds.
        """
        wanted = lane.computed + count - lane.allocated
        if wanted <= 0:
            return True
        self._evict(wanted - self.room, held=not lane.spare)
        if wanted > self.pool.available:
            return False
        lane.slots[lane.allocated : lane.allocated + wanted] = self.pool.allocate(wanted)
        lane.allocated += wanted
        self._private[lane.tree] += wanted
        return True

    def keep_budget(self) -> None:
        """Give up what is beyond the budget and no branch reads."""
        self._evict(-self.room, held=True)

    def fork(self, lane: TokenSequence) -> None:
        """Give slots to the tokens of the lane's forks; forks that find no free ones go."""
        kept = []
        for fork in lane.forks:
            wanted = len(fork.tokens) - len(fork.slots)
            if wanted > self.pool.available or not (fork.above is None or fork.above in kept):
                self.prune([fork])
                continue
            fork.slots = np.concatenate([fork.slots, self.pool.allocate(wanted)])
            kept.append(fork)
        lane.forks = kept

    def prune(self, forks: Iterable[DraftBranch]) -> None:
        """Take the slots of forks back."""
        for fork in forks:
            self.pool.free(fork.slots)
            fork.slots, fork.computed = EMPTY, 0

    def share(self, lane: TokenSequence) -> None:
        """What a lane has computed becomes the radix tree's, and the lane goes on below it."""
        first, last = lane.shared, lane.computed
        if first == last:
            return
        _, spare = self.radix.insert(
            lane.anchor, lane.tokens[first:last], lane.slots[first:last], lane.tree
        )
        self.pool.free(spare)
        anchor, lane.slots[:last] = self.radix.lock(lane.tree, lane.tokens[:last])
        self.radix.unlock(lane.anchor)
        self.radix.reindex_steps(lane.tree, lane.tokens[:last], lane.opened)
        self._private[lane.tree] -= last - first
        lane.anchor, lane.opened, lane.shared = anchor, last, last

    def publish(self, lane: TokenSequence) -> None:
        """End a lane: what it computed becomes the radix tree's, held by its search."""
        first, last = lane.shared, lane.computed
        _, spare = self.radix.insert(
            lane.anchor, lane.tokens[first:last], lane.slots[first:last], lane.tree
        )
        self.pool.free(spare)
        self.pool.free(lane.slots[last : lane.allocated])
        self.radix.reindex_steps(lane.tree, lane.tokens[:last], lane.opened)
        self._end(lane)

    def drop(self, lane: TokenSequence) -> None:
        """End a lane and forget what it computed."""
        self.pool.free(lane.private)
        self._end(lane)

    def retain(self, tree: str, paths: Iterable[np.ndarray]) -> None:
        """Let a search hold no more than these token paths and what its lanes read."""
        reading = [lane.tokens[: lane.shared] for lane in self.lanes if lane.tree == tree]
        self.pool.free(self.radix.retain(tree, [*paths, *reading]))

    def release(self, tree: str, prompt: np.ndarray | None) -> None:
        """Let go of a search without lanes; of its tokens only the prompt's stay cached."""
        if prompt is not None:
            self.radix.keep(tree, prompt)
        self.evictor.remove_tree(tree)
        self.retain(tree, ())
        self.peaks.pop(tree, None)
        self._private.pop(tree, None)

    def note_peaks(self) -> None:
        """Record what each running search and all of them hold now, and what branches read."""
        self.active_peak = max(self.active_peak, self.active_tokens)
        self.reading_peak = max(self.reading_peak, self.reading_tokens)
        for tree in {lane.tree for lane in self.lanes}:
            self.peaks[tree] = max(self.peaks.get(tree, 0), self.tokens_of(tree))

    def check(self, trees: Container[str] | None = None) -> None:
        """Raise AssertionError unless every slot is in one place and all counts agree.

        ``trees``: the searches in flight; no other may hold anything.
        """
        if trees is not None:
            holding = {*+self.radix.held_tokens, *self.peaks, *+self._private}
            assert all(tree in trees for tree in holding), "a search that is over holds KV"
        self.radix.check()
        slots = [self.pool.free_slots(), *(node.slots for node in self.radix.nodes())]
        slots += [lane.private for lane in self.lanes]
        every = np.sort(np.concatenate(slots))
        assert np.array_equal(every, np.arange(self.capacity)), "a slot is lost or used twice"
        private = Counter[str]()
        locks = Counter[int]()
        for lane in self.lanes:
            private[lane.tree] += len(lane.private)
            node = lane.anchor
            while node.parent is not None:
                locks[node.serial] += 1
                node = node.parent
        assert +self._private == +private, "private tokens by search"
        assert {n.serial: n.locks for n in self.radix.nodes() if n.locks} == dict(locks), "locks"

    def _evict(self, lacking: int, *, held: bool) -> None:
        if lacking > 0:
            freed = self.evictor.evict(lacking, held=held)
            self.evicted_tokens += len(freed)
            self.pool.free(freed)

    def _end(self, lane: TokenSequence) -> None:
        self.prune(lane.forks)
        self._private[lane.tree] -= lane.allocated - lane.shared
        self.radix.unlock(lane.anchor)
        self.lanes.remove(lane)
        lane.live = False
