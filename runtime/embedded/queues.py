"""Which branches have a place in the batch, and which wait for one.

A place is a sequence. Branches that have drawn the same share one
(``runtime.embedded.deduplication``) and a prefix has one while it is computed. Who waits, and for
how long, changes no draw.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.embedded.batch import Batch, Refusal
from runtime.embedded.deduplication import DedupKey, dedup_key, with_followers
from runtime.embedded.schedule_order import fair_order
from runtime.embedded.sequence import BranchSequence, Order, TokenSequence
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from runtime.embedded.tracked_search import TrackedSearch


class SequenceQueues:
    """The branches of all searches that are waiting or under way.

    ``waiting``: those that have no place in the batch, oldest first.
    """

    def __init__(
        self,
        batch: Batch,
        accounts: Mapping[str, TrackedSearch],
        speculation: SpeculativeDecoder | None,
        *,
        dedup: bool,
    ) -> None:
        """``dedup``: branches that have drawn the same share a sequence."""
        self.waiting: list[BranchSequence] = []
        self._batch = batch
        self._evictor = batch.cache.evictor
        self._accounts = accounts
        self._speculation = speculation
        self._dedup = dedup

    @property
    def runs(self) -> list[BranchSequence]:
        """The branches that rounds have asked for and that have a sequence, oldest first."""
        asked = [one for one in self._batch.sequences if not one.spare]
        return [one for one in asked if isinstance(one, BranchSequence)]

    def enqueue(self, run: BranchSequence) -> None:
        """Let a branch wait."""
        insort(self.waiting, run, key=order_of)

    def requeue(self, runs: Sequence[BranchSequence]) -> None:
        """Branches that have drawn the same and have no sequence wait for one."""
        for run in runs:
            run.following = []
            self._evictor.preempt_step(run.tree, run.branch.node, run.path())
            self.enqueue(run)

    def admit(self) -> list[BranchSequence]:
        """Let waiting branches in, the trees in turn, as far as places and memory go.

        Returns those that have a sequence now and whose prefix's logits are known; others may
        follow them. For want of memory the KV of all early work goes first.
        """
        admitted: dict[DedupKey | BranchSequence, BranchSequence] = {}
        held_back, closed = [], False
        places = Counter(sequence.tree for sequence in self._batch.sequences)
        for run in fair_order(self.waiting, lambda run: run.tree, places):
            ready = run.prefix.logits is not None
            key = dedup_key(run) if self._dedup else run
            if ready and key in admitted:
                admitted[key].following.append(run)
                self._begun(run)
                continue
            refusal = None if closed else self.start(run)
            if refusal is Refusal.STARVED and self._batch.drop_spare():
                refusal = self.start(run)
            if closed or refusal or not ready:
                held_back.append(run)
            else:
                admitted[key] = run
            closed = closed or refusal in (Refusal.FULL, Refusal.STARVED)
        self.waiting = sorted(held_back, key=order_of)
        return list(admitted.values())

    def start(self, run: BranchSequence) -> Refusal | None:
        """Give a branch a sequence, or have its prefix computed first."""
        return self._start_prefix(run) if run.prefix.logits is None else self._start_run(run)

    def diverge(self, run: BranchSequence) -> None:
        """Branches that followed another go their own ways: what its sequence holds is theirs
        too."""
        self._batch.cache.share(run)
        if self._speculation:
            self._speculation.diverge(run)
        run.call.parted = True

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
        self.waiting = [run for run in self.waiting if run.tree != tree]
        for sequence in [one for one in self._batch.sequences if one.tree == tree]:
            self.finish(sequence, publish=False)

    def _start_prefix(self, run: BranchSequence) -> Refusal | None:
        """Have the prefix of a branch computed, unless it is under way."""
        prefix = run.prefix
        if prefix.live:
            return None
        prefix.order, prefix.spare = run.order, run.spare
        refusal = self._batch.enter(prefix, prefix.tokens, prefix.size - 1)
        if refusal is None:
            account = self._accounts[run.tree]
            account.counters.cached_tokens += prefix.computed
            if prefix.visited:
                account.rehydrate(prefix.missing - 1)
        return refusal

    def _start_run(self, run: BranchSequence) -> Refusal | None:
        """Start a branch whose prefix's logits are known."""
        pending = 1 if run.drawn else 0
        refusal = self._batch.enter(run, run.path(), run.position - pending)
        if refusal is None:
            self._accounts[run.tree].rehydrate(run.missing - pending)
            self._begun(run)
        return refusal

    def _begun(self, run: BranchSequence) -> None:
        """A branch reads its prefix, from the cache if it is not the first."""
        if run.prefix.used and not run.drawn:
            self._accounts[run.tree].counters.cached_tokens += len(run.prefix.tokens)
        run.prefix.used = True


def order_of(run: BranchSequence) -> Order:
    """Whose turn it is: least first."""
    return run.order
