"""Which branches have a place in the batch, which wait for one, and in which order.

A place is a sequence. Branches that have sampled the same share one
(``runtime.embedded.branch_sampling``), and a prefix has one while it is computed. Searches get
equal numbers of places: a search with hundreds of branches gets no more than one with four, as long
as both need more. Which branches wait, and for how long, changes no token.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from runtime.accounting import TrackedSearch
from runtime.embedded.batch import Batch, Refusal
from runtime.embedded.branch_sampling import DedupKey, dedup_key, with_followers
from runtime.embedded.choices import ScheduleOrder
from runtime.embedded.sequence import BranchSequence, TokenSequence, order_of
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from search.engine import Branch

T = TypeVar("T")


def fair_order(
    waiting: Sequence[T], tree_of: Callable[[T], str], running: Mapping[str, int]
) -> Sequence[T]:
    """The order in which to admit what is ``waiting``, which is sorted oldest first.

    The next one is always the oldest of the tree with the fewest places, including those given
    here; among equal trees, the one whose work is older. ``running``: places each tree has already.
    """
    queues: dict[str, deque[T]] = {}
    for work in waiting:
        queues.setdefault(tree_of(work), deque()).append(work)
    if len(queues) < 2:
        return waiting
    heap = [(running.get(tree, 0), age, tree) for age, tree in enumerate(queues)]
    heapify(heap)
    order = []
    while heap:
        places, age, tree = heappop(heap)
        order.append(queues[tree].popleft())
        if queues[tree]:
            heappush(heap, (places + 1, age, tree))
    return order


class SequenceQueues:
    """The waiting and running branches of all searches.

    ``waiting``: the branches that have no place in the batch, oldest first.
    """

    def __init__(
        self,
        batch: Batch,
        searches: Mapping[str, TrackedSearch],
        speculation: SpeculativeDecoder | None,
        *,
        dedup: bool,
    ) -> None:
        """``dedup``: branches that have sampled the same share a sequence."""
        self.waiting: list[BranchSequence] = []
        self._batch = batch
        self._searches = searches
        self._speculation = speculation
        self._dedup = dedup

    @property
    def running(self) -> list[BranchSequence]:
        """The branches with a sequence that rounds have asked for, oldest first."""
        sequences = [sequence for sequence in self._batch.sequences if not sequence.preemptible]
        return [sequence for sequence in sequences if isinstance(sequence, BranchSequence)]

    def enqueue(self, seq: BranchSequence) -> None:
        """Add a branch to the waiting ones."""
        insort(self.waiting, seq, key=order_of)

    def requeue(self, seqs: Sequence[BranchSequence]) -> None:
        """Make branches wait that have sampled the same and have no sequence."""
        for seq in seqs:
            seq.followers = []
            self._batch.cache.evictor.preempt_step(seq.tree, seq.branch.node, seq.path())
            self.enqueue(seq)

    def admit(self) -> list[BranchSequence]:
        """Admit waiting branches, the trees in turn, as far as there are places and memory.

        Returns those that have a sequence now and whose prefix's logits are known; others may
        follow them. Where memory is short, all beam extensions are dropped first.
        """
        admitted: dict[DedupKey | BranchSequence, BranchSequence] = {}
        still_waiting, closed = [], False
        places = Counter(sequence.tree for sequence in self._batch.sequences)
        for seq in fair_order(self.waiting, lambda seq: seq.tree, places):
            ready = seq.prefix.logits is not None
            key = dedup_key(seq) if self._dedup else seq
            if ready and key in admitted:
                admitted[key].followers.append(seq)
                self._count_cached_prefix(seq)
                continue
            refusal = None if closed else self.start(seq)
            if refusal is Refusal.OUT_OF_KV and self._batch.drop_preemptible():
                refusal = self.start(seq)
            if closed or refusal or not ready:
                still_waiting.append(seq)
            else:
                admitted[key] = seq
            closed = closed or refusal in (Refusal.FULL, Refusal.OUT_OF_KV)
        self.waiting = sorted(still_waiting, key=order_of)
        return list(admitted.values())

    def start(self, seq: BranchSequence) -> Refusal | None:
        """Start a branch's sequence, or its prefix's if that has no logits; or return why not."""
        if seq.prefix.logits is None:
            return self._start_prefix(seq)
        pending = 1 if seq.output else 0
        refusal = self._batch.enter(seq, seq.path(), seq.position - pending)
        if refusal is None:
            self._searches[seq.tree].count_rehydrated(seq.missing - pending)
            self._count_cached_prefix(seq)
        return refusal

    def diverge(self, seq: BranchSequence) -> None:
        """Cache what a branch has computed for its followers, which get sequences of their own."""
        self._batch.cache.share(seq)
        if self._speculation:
            self._speculation.draft_model.diverge(seq)
        seq.call.diverged = True

    def finish(self, sequence: TokenSequence, *, publish: bool = True) -> None:
        """End a sequence; ``publish``: cache its KV, because something may follow."""
        if self._speculation and isinstance(sequence, BranchSequence):
            self._speculation.end(sequence, publish=publish)
        (self._batch.publish if publish else self._batch.drop)(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Make the branches of a preempted sequence wait again."""
        if isinstance(sequence, BranchSequence):
            if self._speculation:
                self._speculation.end(sequence, publish=True)
            self.requeue(with_followers(sequence))

    def remove_tree(self, tree: str) -> None:
        """Stop a search's branches."""
        self.waiting = [seq for seq in self.waiting if seq.tree != tree]
        for sequence in [sequence for sequence in self._batch.sequences if sequence.tree == tree]:
            self.finish(sequence, publish=False)

    def _start_prefix(self, seq: BranchSequence) -> Refusal | None:
        """Start a sequence for a branch's prefix, unless it has one; or return why not."""
        prefix = seq.prefix
        if prefix.live:
            return None
        prefix.order, prefix.preemptible = seq.order, seq.preemptible
        refusal = self._batch.enter(prefix, prefix.tokens, prefix.size - 1)
        if refusal is None:
            search = self._searches[seq.tree]
            search.counters.cached_tokens += prefix.computed
            if prefix.visited:
                search.count_rehydrated(prefix.missing - 1)
        return refusal

    def _count_cached_prefix(self, seq: BranchSequence) -> None:
        """Count a branch's prefix as read from the cache, unless the branch is the first one."""
        if seq.prefix.used and not seq.output:
            self._searches[seq.tree].counters.cached_tokens += len(seq.prefix.tokens)
        seq.prefix.used = True


def _in_order(branches: Sequence[Branch]) -> list[int]:
    return [0] * len(branches)


def _nth_child(branches: Sequence[Branch]) -> list[int]:
    counts = Counter[int]()
    keys = []
    for branch in branches:
        keys.append(counts[branch.parent])
        counts[branch.parent] += 1
    return keys


def _by_seed(branches: Sequence[Branch]) -> list[int]:
    return [branch.seed for branch in branches]


SCHEDULE_ORDERS: Mapping[ScheduleOrder, Callable[[Sequence[Branch]], list[int]]] = {
    "prefix": _in_order,
    "fcfs": _nth_child,
    "random": _by_seed,
}
"""Functions that give each branch a key, for branches sorted by parent and child; the lowest key
goes first, among equal ones the earlier branch. ``prefix``: siblings together, in their parents'
order (FlashTTS, section 4.2), so that the next path shares most with the last. ``fcfs``: as in a
queue of copied beams, the first child of every beam, then the second of every beam."""


def ranks(branches: Sequence[Branch], order: ScheduleOrder) -> list[int]:
    """Each branch's rank in the order, from 0."""
    keys = SCHEDULE_ORDERS[order](branches)
    places = [0] * len(branches)
    for rank, index in enumerate(sorted(range(len(branches)), key=keys.__getitem__)):
        places[index] = rank
    return places
