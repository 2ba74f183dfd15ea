"""Which branches have a place in the batch, which wait for one, and who goes first.

A place is a sequence. Branches that have sampled the same share one
(``runtime.embedded.branch_sampling``) and a prefix has one while it is computed. Searches get
places in equal parts: one with hundreds of branches no more than one with four as long as both want
more. Who waits, and for how long, changes no token.
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
    """The order in which to let in what is ``waiting``, which is given oldest first.

    Next is always the oldest of the tree that has the fewest places, those given here included;
    of equal ones the tree whose work is older. ``running``: places a tree has already.
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
    """The branches of all searches that are waiting or running.

    ``waiting``: those that have no place in the batch, oldest first.
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
        """The branches that rounds have asked for and that have a sequence, oldest first."""
        rounds = [one for one in self._batch.sequences if not one.preemptible]
        return [one for one in rounds if isinstance(one, BranchSequence)]

    def enqueue(self, seq: BranchSequence) -> None:
        """Let a branch wait."""
        insort(self.waiting, seq, key=order_of)

    def requeue(self, seqs: Sequence[BranchSequence]) -> None:
        """Branches that have sampled the same and have no sequence wait for one."""
        for seq in seqs:
            seq.followers = []
            self._batch.cache.evictor.preempt_step(seq.tree, seq.branch.node, seq.path())
            self.enqueue(seq)

    def admit(self) -> list[BranchSequence]:
        """Let waiting branches in, the trees in turn, as far as places and memory go.

        Returns those that have a sequence now and whose prefix's logits are known; others may
        follow them. Where memory is short the KV of all beam extensions goes first.
        """
        admitted: dict[DedupKey | BranchSequence, BranchSequence] = {}
        held_back, closed = [], False
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
                held_back.append(seq)
            else:
                admitted[key] = seq
            closed = closed or refusal in (Refusal.FULL, Refusal.OUT_OF_KV)
        self.waiting = sorted(held_back, key=order_of)
        return list(admitted.values())

    def start(self, seq: BranchSequence) -> Refusal | None:
        """Give a branch a sequence, or have its prefix computed first."""
        if seq.prefix.logits is None:
            return self._start_prefix(seq)
        pending = 1 if seq.output else 0
        refusal = self._batch.enter(seq, seq.path(), seq.position - pending)
        if refusal is None:
            self._searches[seq.tree].count_rehydrated(seq.missing - pending)
            self._count_cached_prefix(seq)
        return refusal

    def diverge(self, seq: BranchSequence) -> None:
        """Followers of a branch get sequences of their own, which read what it has computed."""
        self._batch.cache.share(seq)
        if self._speculation:
            self._speculation.draft_model.diverge(seq)
        seq.call.diverged = True

    def finish(self, sequence: TokenSequence, *, publish: bool = True) -> None:
        """Take a sequence out of the batch; its KV is cached unless nothing can follow."""
        if self._speculation and isinstance(sequence, BranchSequence):
            self._speculation.end(sequence, publish=publish)
        (self._batch.publish if publish else self._batch.drop)(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """A sequence lost its place to older ones: its branches wait again."""
        if isinstance(sequence, BranchSequence):
            if self._speculation:
                self._speculation.end(sequence, publish=True)
            self.requeue(with_followers(sequence))

    def remove_tree(self, tree: str) -> None:
        """A search's branches stop."""
        self.waiting = [seq for seq in self.waiting if seq.tree != tree]
        for sequence in [one for one in self._batch.sequences if one.tree == tree]:
            self.finish(sequence, publish=False)

    def _start_prefix(self, seq: BranchSequence) -> Refusal | None:
        """Have the prefix of a branch computed, unless that has begun."""
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
        """A branch reads its prefix, from the cache if it is not the first."""
        if seq.prefix.used and not seq.output:
            self._searches[seq.tree].counters.cached_tokens += len(seq.prefix.tokens)
        seq.prefix.used = True


def _in_order(branches: Sequence[Branch]) -> list[int]:
    return [0] * len(branches)


def _nth_child(branches: Sequence[Branch]) -> list[int]:
    seen = Counter[int]()
    keys = []
    for branch in branches:
        keys.append(seen[branch.parent])
        seen[branch.parent] += 1
    return keys


def _by_seed(branches: Sequence[Branch]) -> list[int]:
    return [branch.seed for branch in branches]


SCHEDULE_ORDERS: Mapping[ScheduleOrder, Callable[[Sequence[Branch]], list[int]]] = {
    "prefix": _in_order,
    "fcfs": _nth_child,
    "random": _by_seed,
}
"""A key for each branch, listed by rising parent and child; the least goes first, of equal ones the
one listed first. ``prefix``: siblings together, their parents as they came (FlashTTS, section 4.2):
the next path is one that shares most with the last. ``fcfs``: as a queue of copied beams gets them,
every beam's first child, then every second one."""


def ranks(branches: Sequence[Branch], order: ScheduleOrder) -> list[int]:
    """Each branch's place in the order, from 0."""
    keys = SCHEDULE_ORDERS[order](branches)
    places = [0] * len(branches)
    for rank, at in enumerate(sorted(range(len(branches)), key=keys.__getitem__)):
        places[at] = rank
    return places
