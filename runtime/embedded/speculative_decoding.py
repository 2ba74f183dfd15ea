"""Speculative decoding in rounds (SEED, section 4): a draft model runs ahead, the target verifies.

``scheduled``: all ready branches are drafted for in one batch and verified first come, first
served, ``verify_batch`` at once (the paper's is 1); a verified branch goes back to drafting.
Branches that share a sequence share its draft and its verification.
``serial``: one branch is drafted for and verified until it ends, then the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.embedded.batch import Advance
from runtime.embedded.branch_sampling import FollowerTokens, VerifiedTokens
from runtime.embedded.draft_length import DraftLength
from runtime.embedded.draft_model import DraftModel
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.sequence import BranchSequence, DraftTree
from runtime.text import Text


class SpeculativeDecoder:
    """Chooses which branches are drafted for, and whose drafts are verified next."""

    def __init__(
        self,
        options: EngineOptions,
        draft_model: DraftModel,
        draft_length: DraftLength,
        clock: Callable[[], float],
    ) -> None:
        self.draft_model = draft_model
        self.draft_length = draft_length
        self._serial = options.draft == "serial"
        self._verify_batch = 1 if self._serial else options.verify_batch
        self._clock = clock
        self._queue: dict[BranchSequence, DraftTree] = {}
        self._pass_start = self._draft_end = 0.0
        self._tokens = self._rows = 0

    def begin_pass(self, running: Sequence[BranchSequence]) -> set[BranchSequence]:
        """Begin a pass of the target: draft, and attach the drafts that it verifies. Returns the
        sequences that the pass must leave out.

        ``running``: the branches that have a sequence, oldest first.
        """
        self._pass_start, self._tokens, self._rows = self._clock(), 0, 0
        admitted = running[:1] if self._serial else running
        ready = [seq for seq in admitted if seq.missing == 1]
        verifying = self._draft(ready) if ready else []
        skip = {seq for seq in running if seq not in verifying}
        skip -= {seq for seq in admitted if seq not in ready}
        self._draft_end = self._clock()
        return skip

    def note_pass(self, advances: Sequence[Advance]) -> None:
        """Note a pass's rows: its time is measured only if every sequence in it samples."""
        if all(advance.logits is not None for advance in advances):
            self._rows = sum(advance.all_rows for advance in advances)

    def note_verified(self, verified: VerifiedTokens) -> None:
        """Count the tokens that a branch got."""
        count, at_end = len(verified.tokens), verified.finish is not None
        self._tokens += count
        self.draft_length.note_verified(count, verified.tested, verified.accepted, at_end=at_end)

    def note_followers(self, verified: VerifiedTokens, follower_tokens: FollowerTokens) -> None:
        """Count the tokens of the followers of a branch that got ``verified``."""
        self._tokens += sum(follower_tokens.counts)
        for count, matching in zip(follower_tokens.counts, follower_tokens.matching, strict=True):
            tested, accepted = min(count, verified.tested), min(matching, verified.accepted)
            self.draft_length.followers.test(tested, accepted)

    def end_pass(self) -> None:
        """End a pass whose tokens have been sampled, and record its time."""
        if self._rows:
            end = self._clock()
            self.draft_length.target.add(self._rows, end - self._draft_end)
            self.draft_length.note_round(self._tokens, end - self._pass_start)

    def end(self, seq: BranchSequence, *, publish: bool) -> None:
        """Forget a branch that has ended or was preempted; see ``DraftModel.end``."""
        self._queue.pop(seq, None)
        self.draft_model.end(seq, publish=publish)

    def _draft(self, ready: Sequence[BranchSequence]) -> list[BranchSequence]:
        """Draft for ready branches without a draft; attach theirs to the next in the queue."""
        at_once = min(self._verify_batch or len(ready), len(ready))
        length, branches = self.draft_length.plan(
            len(ready),
            at_once,
            1 if self._serial else len(ready),
            sum(len(seq.followers) for seq in ready) / len(ready),
        )
        new = [seq for seq in ready if seq not in self._queue]
        lengths = {seq: min(length, seq.remaining - 1) for seq in new[:branches]}
        drafts = self.draft_model.propose(
            {seq: self.draft_length.widths(n) for seq, n in lengths.items() if n}
        )
        self._queue |= {seq: drafts.get(seq) or DraftTree() for seq in new}
        if branches < len(ready):  # a trial, or no drafts: no branch waits for others' drafts
            at_once = len(ready)
        verifying = list(self._queue)[:at_once]
        for seq in verifying:
            seq.attach_draft(self._queue.pop(seq))
        return verifying


def load_speculative_decoder(
    options: EngineOptions,
    policy: Text,
    clock: Callable[[], float],
    model: type[DraftModel] = DraftModel,
) -> SpeculativeDecoder | None:
    """The decoder of ``options``; None if they do not draft. Raises ValueError if the draft model's
    tokenizer differs from the policy's.

    The draft model's arithmetic need not be exact, because no answer depends on its proposals.
    """
    if options.draft == "off" or options.draft_model is None:
        return None
    text = Text(options.draft_model)
    if text.pieces != policy.pieces:
        raise ValueError(f"draft_model: {text.checkpoint} has another tokenizer than the policy")
    forward = Forward(
        options.draft_model, exact=False, threads=options.pass_threads, kernel=options.kernel
    )
    draft_length = DraftLength(options.draft_tokens, options.k_config)
    draft_model = model(
        options,
        forward,
        forward.config,
        eos=policy.eos,
        pass_time=draft_length.draft,
        clock=clock,
    )
    return SpeculativeDecoder(options, draft_model, draft_length, clock)
