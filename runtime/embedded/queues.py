"""Which branches have a place in the batch, and which wait for one.

A place is a sequence. Branches that have sampled the same share one
(``runtime.embedded.deduplication``) and a prefix has one while it is computed. Who waits, and for
how long, changes no token.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.embedded.batch import Batch, Refusal
from runtime.embedded.deduplication import DedupKey, dedup_key, with_followers
from runtime.embedded.schedule_order import fair_order
from runtime.embedded.sequence import BranchSequence, TokenSequence, order_of
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from runtime.embedded.tracked_search import TrackedSearch


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
