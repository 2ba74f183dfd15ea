"""Speculative decoding in rounds (SEED, section 4): the draft runs ahead, the target checks.

``scheduled``: all branches that are ready are drafted for in one batch, and checked first come,
first served, so many at once (1 is the paper's); a checked branch goes back to drafting, which a
thread does while the target checks the next. Branches that share a lane share its draft and its
check.
``serial``: one branch is drafted for and checked until it ends, then the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.embedded.batch import Advance, Batch
from runtime.embedded.deduplication import FollowerTokens
from runtime.embedded.draft_length import DraftLength
from runtime.embedded.draft_model import DraftModel
from runtime.embedded.draft_tree import DraftTree
from runtime.embedded.draft_verification import VerifiedTokens
from runtime.embedded.expand_call import BranchSequence


class SpeculativeDecoder:
    """Who is drafted for, and whose proposals are checked next."""

    def __init__(
        self,
        drafter: DraftModel,
        pace: DraftLength,
        *,
        serial: bool,
        verify_batch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``verify_batch``: branches checked at once; 0 for all that are ready."""
        self.drafter = drafter
        self.pace = pace
        self._most = 1 if serial else verify_batch
        self._serial = serial
        self._clock = clock
        self._queue: dict[BranchSequence, DraftTree] = {}
        self._beside = ThreadPoolExecutor(1, "draft") if self._most and not serial else None
        self._coming: Future[None] | None = None
        self._pass: tuple[int, float] | None = None
        self._begun = 0.0
        self._tokens = 0

    def advance(self, batch: Batch, running: Sequence[BranchSequence]) -> list[Advance]:
        """One pass of the target, in which those whose turn it is have their proposals checked.

        ``running``: the branches that have a lane, oldest first.
        """
        self._begun, self._tokens = self._clock(), 0
        turns = running[:1] if self._serial else running
        ready = [run for run in turns if run.lane is not None and run.lane.missing == 1]
        served, waiting = self._serve(ready) if ready else ([], {})
        held = {run.lane for run in running if run not in served and run.lane is not None}
        held -= {run.lane for run in turns if run not in ready}
        start = self._clock()
        try:
            advances = batch.advance(held, lambda: self._draft_beside(waiting))
        finally:
            waited = self._join()
        self._pass = None
        if all(advance.logits is not None for advance in advances):
            self._pass = sum(advance.all_rows for advance in advances), start + waited
        return advances

    def drawn(self) -> None:
        """The tokens of the pass have been drawn: it is over."""
        if self._pass is not None and self._pass[0]:
            (rows, start), end = self._pass, self._clock()
            self.pace.target.add(rows, end - start)
            self.pace.came(self._tokens, end - self._begun)

    def took(self, taken: VerifiedTokens) -> None:
        """A branch was given tokens."""
        self._tokens += len(taken.tokens)
        ended = taken.finish is not None
        self.pace.took(len(taken.tokens), taken.tested, taken.accepted, ended=ended)

    @property
    def rejects(self) -> bool:
        """Whether drafts are accepted by rejection, not by the branches' own draws."""
        return self.drafter.rejects

    def followed(self, taken: VerifiedTokens, followed: FollowerTokens) -> None:
        """Branches that share the lane of one that has ``taken`` guesses went along with it."""
        self._tokens += sum(followed.given)
        for given, agreed in zip(followed.given, followed.agreed, strict=True):
            tested, accepted = min(given, taken.tested), min(agreed, taken.accepted)
            self.pace.following.add(tested, accepted)

    def part(self, run: BranchSequence) -> None:
        """Branches that followed one go their own ways."""
        self.drafter.part(run)

    def end(self, run: BranchSequence, *, publish: bool) -> None:
        """A branch has ended or lost its place."""
        self._queue.pop(run, None)
        self.drafter.end(run, publish=publish)

    def _serve(
        self, ready: Sequence[BranchSequence]
    ) -> tuple[list[BranchSequence], Mapping[BranchSequence, Sequence[int]]]:
        """Give their proposals to the first in the queue; those who have none are drafted for now,
        unless others can be checked meanwhile: then here is what to draft for them."""
        together = min(self._most or len(ready), len(ready))
        length, branches = self.pace.plan(
            len(ready),
            together,
            1 if self._serial else len(ready),
            sum(len(run.following) for run in ready) / len(ready),
        )
        new = [run for run in ready if run not in self._queue]
        wishes = {run: self.pace.widths(min(length, run.left - 1)) for run in new[:branches]}
        if self._beside is None or not self._queue or branches < len(ready):
            self._draft(new, wishes)
            wishes = {}
        if branches < len(ready):  # a trial, or none: nobody waits for it
            together = len(ready)
        served = list(self._queue)[:together]
        for run in served:
            assert run.lane is not None, "a branch without a lane is in the queue"
            run.lane.propose(self._queue.pop(run))
        return served, wishes

    def _draft(
        self, runs: Sequence[BranchSequence], wishes: Mapping[BranchSequence, Sequence[int]]
    ) -> None:
        """Let branches join the queue with what the draft proposes, nothing where none is asked."""
        found = self.drafter.propose({run: widths for run, widths in wishes.items() if widths})
        self._queue |= {run: found.get(run) or DraftTree() for run in runs}

    def _draft_beside(self, waiting: Mapping[BranchSequence, Sequence[int]]) -> None:
        """Draft for branches that still have their place while the target computes."""
        wishes = {run: widths for run, widths in waiting.items() if run.lane is not None}
        if wishes and self._beside is not None:
            self._coming = self._beside.submit(self._draft, list(wishes), wishes)

    def _join(self) -> float:
        """Wait for what is drafted beside a pass; the seconds that took."""
        if self._coming is None:
            return 0.0
        start, coming, self._coming = self._clock(), self._coming, None
        coming.result()
        return self._clock() - start
