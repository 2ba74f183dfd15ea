"""Speculative decoding in rounds (SEED, section 4): the draft runs ahead, the target checks.

``scheduled``: all branches that are ready are drafted for in one batch, and checked first come,
first served, so many at once (1 is the paper's); a checked branch goes back to drafting. Branches
that share a sequence share its draft and its check.
``serial``: one branch is drafted for and checked until it ends, then the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.embedded.batch import Advance
from runtime.embedded.deduplication import FollowerTokens, VerifiedTokens
from runtime.embedded.draft_length import DraftLength
from runtime.embedded.draft_model import DraftModel
from runtime.embedded.draft_tree import DraftTree
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.sequence import BranchSequence
from runtime.text import Text


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
        self._begun = self._drafted = 0.0
        self._tokens = self._rows = 0

    def begin(self, running: Sequence[BranchSequence]) -> set[BranchSequence]:
        """A pass of the target begins, in which those whose turn it is have their proposals
        checked; the sequences that are to be held back.

        ``running``: the branches that have a sequence, oldest first.
        """
        self._begun, self._tokens, self._rows = self._clock(), 0, 0
        turns = running[:1] if self._serial else running
        ready = [run for run in turns if run.missing == 1]
        served = self._serve(ready) if ready else []
        held = {run for run in running if run not in served}
        held -= {run for run in turns if run not in ready}
        self._drafted = self._clock()
        return held

    def ran(self, advances: Sequence[Advance]) -> None:
        """What the pass did: its time counts if every sequence in it sampled."""
        if all(advance.logits is not None for advance in advances):
            self._rows = sum(advance.all_rows for advance in advances)

    def drawn(self) -> None:
        """The tokens of the pass have been drawn: it is over."""
        if self._rows:
            end = self._clock()
            self.pace.target.add(self._rows, end - self._drafted)
            self.pace.came(self._tokens, end - self._begun)

    def took(self, taken: VerifiedTokens) -> None:
        """A branch was given tokens."""
        self._tokens += len(taken.tokens)
        ended = taken.finish is not None
        self.pace.took(len(taken.tokens), taken.tested, taken.accepted, ended=ended)

    def followed(self, taken: VerifiedTokens, followed: FollowerTokens) -> None:
        """Branches that share the sequence of one that has ``taken`` guesses went along with it."""
        self._tokens += sum(followed.given)
        for given, agreed in zip(followed.given, followed.agreed, strict=True):
            tested, accepted = min(given, taken.tested), min(agreed, taken.accepted)
            self.pace.following.test(tested, accepted)

    def diverge(self, run: BranchSequence) -> None:
        """Branches that followed one go their own ways."""
        self.drafter.diverge(run)

    def end(self, run: BranchSequence, *, publish: bool) -> None:
        """A branch has ended or lost its place."""
        self._queue.pop(run, None)
        self.drafter.end(run, publish=publish)

    def _serve(self, ready: Sequence[BranchSequence]) -> list[BranchSequence]:
        """Draft for those that have no proposals; give theirs to the first in the queue."""
        together = min(self._most or len(ready), len(ready))
        length, branches = self.pace.plan(
            len(ready),
            together,
            1 if self._serial else len(ready),
            sum(len(run.following) for run in ready) / len(ready),
        )
        self._draft([run for run in ready if run not in self._queue], length, branches)
        if branches < len(ready):  # a trial, or none: nobody waits for it
            together = len(ready)
        served = list(self._queue)[:together]
        for run in served:
            run.propose(self._queue.pop(run))
        return served

    def _draft(self, runs: Sequence[BranchSequence], length: int, branches: int) -> None:
        """Draft up to ``length`` tokens for the first ``branches``; all ``runs`` join the queue."""
        widths = {run: self.pace.widths(min(length, run.left - 1)) for run in runs[:branches]}
        found = self.drafter.propose({run: wanted for run, wanted in widths.items() if wanted})
        self._queue |= {run: found.get(run) or DraftTree() for run in runs}


def load_speculative_decoder(
    options: EngineOptions,
    policy: Text,
    clock: Callable[[], float] = time.perf_counter,
    draft_model: type[DraftModel] = DraftModel,
) -> SpeculativeDecoder | None:
    """None where nothing is to draft. Raises ValueError for a draft with another tokenizer.

    The draft's arithmetic need not be exact: what it says is never part of an answer.
    """
    if options.draft == "off" or options.draft_model is None:
        return None
    text = Text(options.draft_model)
    if text.pieces != policy.pieces:
        raise ValueError(f"draft_model: {text.checkpoint} has another tokenizer than the policy")
    forward = Forward(
        options.draft_model, exact=False, threads=options.pass_threads, kernel=options.kernel
    )
    pace = DraftLength(options.draft_tokens, options.k_config)
    drafter = draft_model(
        forward,
        context=text.context,
        kv_tokens=options.draft_kv_tokens,
        batch_limit=options.batch_limit,
        eos=policy.eos,
        flops=forward.config.flops,
        timed=pace.draft.add,
        clock=clock,
    )
    return SpeculativeDecoder(
        drafter,
        pace,
        serial=options.draft == "serial",
        verify_batch=options.verify_batch,
        clock=clock,
    )
