"""Which branches have a place in the batch, and which wait for one.

A place is a lane. Branches that have drawn the same share one (``runtime.embedded.deduplication``)
and a prefix has one while it is computed. Who waits, and for how long, changes no draw.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.embedded.account import Account
from runtime.embedded.batch import Batch, Refusal
from runtime.embedded.deduplication import DedupKey, dedup_key, with_followers
from runtime.embedded.expand_call import BranchSequence, SharedPrefix
from runtime.embedded.fairness import fair_order
from runtime.embedded.sequence import Order, TokenSequence
from runtime.embedded.speculative_decoding import SpeculativeDecoder


class SequenceQueues:
    """The branches of all searches that are waiting or under way.

    ``waiting``: those without a lane, oldest first; ``running``: whose each lane is.
    """

    def __init__(
        self,
        batch: Batch,
        accounts: Mapping[str, Account],
        speculation: SpeculativeDecoder | None,
        *,
        dedup: bool,
    ) -> None:
        """``dedup``: branches that have drawn the same share a lane."""
        self.waiting: list[BranchSequence] = []
        self.running: dict[TokenSequence, BranchSequence | SharedPrefix] = {}
        self._batch = batch
        self._evictor = batch.cache.evictor
        self._accounts = accounts
        self._speculation = speculation
        self._dedup = dedup

    @property
    def runs(self) -> list[BranchSequence]:
        """The branches that rounds have asked for and that have a lane, oldest first."""
        works = self.running.values()
        return sorted(
            (w for w in works if isinstance(w, BranchSequence) and not w.early), key=order_of
        )

    def enqueue(self, run: BranchSequence) -> None:
        """Let a branch wait."""
        insort(self.waiting, run, key=order_of)

    def requeue(self, runs: Sequence[BranchSequence]) -> None:
        """Branches that have drawn the same and have no lane wait for one."""
        for run in runs:
            run.following = []
            self._evictor.preempt_step(run.call.tree, run.branch.node, run.tokens())
            self.enqueue(run)

    def admit(self) -> list[BranchSequence]:
        """Let waiting branches in, the trees in turn, as far as places and memory go.

        Returns those that have a lane now and whose prefix's logits are known; others may follow
        them. For want of memory the KV of all early work goes first.
        """
        admitted: dict[DedupKey | BranchSequence, BranchSequence] = {}
        held_back, closed = [], False
        places = Counter(lane.tree for lane in self.running)
        for run in fair_order(self.waiting, lambda run: run.call.tree, places):
            ready = run.prefix.logits is not None
            key = dedup_key(run) if self._dedup else run
            if ready and key in admitted:
                admitted[key].following.append(run)
                self._begun(run)
                continue
            refusal = None if closed else self.start(run)
            if refusal is Refusal.STARVED and self._drop_early():
                refusal = self.start(run)
            if closed or refusal or not ready:
                held_back.append(run)
            else:
                admitted[key] = run
            closed = closed or refusal in (Refusal.FULL, Refusal.STARVED)
        self.waiting = sorted(held_back, key=order_of)
        return list(admitted.values())

    def start(self, run: BranchSequence) -> Refusal | None:
        """Give a branch a lane, or have its prefix computed first."""
        return self._start_prefix(run) if run.prefix.logits is None else self._start_run(run)

    def diverge(self, run: BranchSequence) -> None:
        """Branches that followed another go their own ways: what its lane holds is theirs too."""
        assert run.lane is not None, "nobody follows a branch without a lane"
        self._batch.cache.share(run.lane)
        if self._speculation:
            self._speculation.diverge(run)
        run.call.parted = True

    def finish(self, work: BranchSequence | SharedPrefix, *, publish: bool = True) -> None:
        """Take a lane out of the batch; what it computed is cached unless nothing can follow."""
        assert work.lane is not None, "work without a lane has left already"
        if self._speculation and isinstance(work, BranchSequence):
            self._speculation.end(work, publish=publish)
        del self.running[work.lane]
        if publish:
            self._batch.publish(work.lane)
        else:
            self._batch.drop(work.lane)
        work.lane = None

    def preempt(self, lane: TokenSequence) -> None:
        """A lane lost its place to older ones: its branches wait again."""
        work = self.running.pop(lane)
        work.lane = None
        if isinstance(work, BranchSequence):
            if self._speculation:
                self._speculation.end(work, publish=True)
            self.requeue(with_followers(work))

    def forget(self, lane: TokenSequence) -> None:
        """A lane of early work was dropped; where it was paused its branch sees that for itself."""
        work = self.running.pop(lane, None)
        if work is not None:
            work.lane = None

    def remove_tree(self, tree: str) -> None:
        """A search's branches stop."""
        self.waiting = [run for run in self.waiting if run.call.tree != tree]
        for work in [work for lane, work in self.running.items() if lane.tree == tree]:
            self.finish(work, publish=False)

    def _drop_early(self) -> bool:
        """Drop all KV of early work; whether there was any."""
        dropped = self._batch.drop_spare()
        for lane in dropped:
            self.forget(lane)
        return bool(dropped)

    def _start_prefix(self, run: BranchSequence) -> Refusal | None:
        """Have the prefix of a branch computed, unless it is under way."""
        prefix, tree = run.prefix, run.call.tree
        if prefix.lane is not None:
            return None
        size = len(prefix.tokens)
        lane = self._batch.enter(
            tree, run.order, prefix.tokens, size=size, upto=size - 1, spare=run.early
        )
        if isinstance(lane, Refusal):
            return lane
        prefix.lane = lane
        self.running[lane] = prefix
        self._accounts[tree].cached_tokens += lane.computed
        if prefix.known:
            self._accounts[tree].rehydrate(lane.missing - 1)
        return None

    def _start_run(self, run: BranchSequence) -> Refusal | None:
        """Give a branch whose prefix's logits are known a lane of its own."""
        prefix, tree, tokens = run.prefix, run.call.tree, run.tokens()
        pending = 1 if run.drawn else 0
        size = len(prefix.tokens) + run.branch.limit
        upto = len(tokens) - pending
        lane = self._batch.enter(tree, run.order, tokens, size=size, upto=upto, spare=run.early)
        if isinstance(lane, Refusal):
            return lane
        run.lane = lane
        self.running[lane] = run
        self._accounts[tree].rehydrate(lane.missing - pending)
        self._begun(run)
        return None

    def _begun(self, run: BranchSequence) -> None:
        """A branch reads its prefix, from the cache if it is not the first."""
        if run.prefix.used and not run.drawn:
            self._accounts[run.call.tree].cached_tokens += len(run.prefix.tokens)
        run.prefix.used = True


def order_of(run: BranchSequence) -> Order:
    """Whose turn it is: least first."""
    return run.order
