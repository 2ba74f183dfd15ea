"""Decode steps: all branches of all searches in one batch of one policy model.

A branch waits, its prefix is prefilled (once for all siblings that share it), and from the last
row's logits each sibling samples its own first token and goes on decoding. When a step ends, what
it computed joins the radix tree, unless it ended the reply. Order, batching and memory decide when
a token is sampled, never which token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from kvpolicy.block_table import confidence_of_entropy
from runtime.accounting import TrackedSearch, total_of
from runtime.embedded.batch import Advance, Batch, Forwards, charge_pass
from runtime.embedded.beam_extension import BeamExtension
from runtime.embedded.branch_sampling import (
    FollowerTokens,
    SampleFunction,
    VerifiedTokens,
    sample_requests,
    sample_together,
    with_followers,
)
from runtime.embedded.choices import ScheduleOrder
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.options import EngineOptions
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.queues import SequenceQueues, ranks
from runtime.embedded.sequence import (
    BranchSequence,
    ExpandCall,
    ExpandResult,
    SharedPrefix,
    StepBuilder,
)
from runtime.embedded.speculative_decoding import SpeculativeDecoder, load_speculative_decoder
from runtime.embedded.validation import CallError, CallErrors, validate_branches
from runtime.text import Text
from search.counters import Counters
from search.engine import Branch, Hint, KvFull, KvMoved, Sampling
from search.tree import ROOT, Finish


class Scheduler:
    """Schedules one policy model's branches, waiting and running, and manages the searches' KV."""

    def __init__(
        self,
        options: EngineOptions,
        forward: Forwards,
        config: ModelConfig,
        text: Text,
        *,
        speculation: SpeculativeDecoder | None = None,
        sample: SampleFunction = sample_requests,
    ) -> None:
        """``config`` and ``text``: the policy model's; ``speculation``: the speculative decoder,
        None to decode without drafts."""
        self.cache = PrefixCache(options.kv_tokens, options.kv_policy, options.value_params())
        self.batch = Batch(forward, self.cache, limit=options.batch_limit)
        self.searches: dict[str, TrackedSearch] = {}
        self.preemptions = 0
        self.errors = CallErrors()
        """Errors of calls without an answer, and of searches that the caller must release."""
        self.speculation = speculation
        self._sample = sample
        self.steps = StepBuilder(text)
        self._context, self._vocab, self._flops = config.context, config.vocab, config.flops
        self._order: ScheduleOrder = options.order
        self._queues = SequenceQueues(self.batch, self.searches, speculation, dedup=options.dedup)
        self.beam_extension = BeamExtension(
            self.batch, self._queues, self.searches, self.steps, on=options.speculate
        )
        self._past = Counters()
        self._calls: dict[int, ExpandCall] = {}
        self._finished: list[ExpandCall] = []
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to decode or to answer."""
        return bool(self._calls or self._finished)

    @property
    def running(self) -> int:
        """Branches in the batch."""
        return sum(len(with_followers(seq)) for seq in self._queues.running)

    @property
    def waiting(self) -> int:
        """Branches that wait for memory, for their prefix, or for a place in the batch."""
        return len(self._queues.waiting)

    def expand(
        self,
        call_id: int,
        tree: str,
        branches: Sequence[Branch],
        sampling: Sampling,
        *,
        foreign: bool = False,
    ) -> None:
        """Begin a round. Raises EngineError if a branch can never run.

        ``foreign``: its prefixes do not continue what was decoded here before.
        """
        limits = {"context": self._context, "kv_tokens": self.cache.capacity}
        tokens = validate_branches(branches, sampling, self._vocab, limits)
        if tree not in self.searches:
            self._arrivals += 1
            self.searches[tree] = TrackedSearch(self._arrivals)
        search = self.searches[tree]
        self._arrivals += 1
        call = self.steps.call(call_id, self._arrivals, tree, sampling, len(branches))
        self._calls[call_id] = call
        prefixes: dict[tuple[int, ...], SharedPrefix] = {}
        seqs = []
        for index, (branch, rank) in enumerate(
            zip(branches, ranks(branches, self._order), strict=True)
        ):
            if branch.tokens not in prefixes:
                prefixes[branch.tokens] = self._prefix(tree, branch, tokens[index], foreign)
            order = (search.number, call.number, rank)
            seqs.append(BranchSequence(call, index, branch, prefixes[branch.tokens], order))
        self._enqueue(tree, seqs)
        if not seqs:
            self._finished.append(self._calls.pop(call_id))

    def step(self) -> list[ExpandResult]:
        """Run one iteration: admit, run one forward pass, sample. Returns the finished calls."""
        if self._queues.waiting:
            self.beam_extension.pause_all()
            self._sample_first(self._queues.admit())
        if not self._queues.waiting and self.batch.sequences:
            self._sample_first(self.beam_extension.fill_idle_places())
        branch_logits = []
        for advance in self._run_pass():
            if advance.logits is None:
                continue
            sequence = advance.sequence
            if isinstance(sequence, BranchSequence):
                children = [logits for _, logits in advance.children]
                branch_logits.append((sequence, torch.cat([advance.logits, *children])))
            elif isinstance(sequence, SharedPrefix):
                sequence.logits = advance.logits.clone()
                self._queues.finish(sequence)
        self._sample_next(branch_logits)
        if self.speculation:
            self.speculation.end_pass()
        return self._results()

    def check(self) -> None:
        """Raise AssertionError unless the accounting of all caches is right."""
        self.cache.check(self.searches)
        if self.speculation:
            self.speculation.draft_model.cache.check(self.searches)

    def hint(self, tree: str, hint: Hint) -> None:
        """Free the KV of what a search has pruned."""
        if tree not in self.searches:
            return
        self.beam_extension.mark_dead(tree, hint.dead)
        self.cache.evictor.hint(tree, hint)
        if self.searches[tree].mark_dead(hint.dead):
            self._retain(tree)

    def abort(self, tree: str) -> list[int]:
        """Stop a search's branches; the ids of the calls that get no answer."""
        self.beam_extension.remove_tree(tree)
        self._queues.remove_tree(tree)
        calls = [*self._calls.values(), *self._finished]
        self._calls = {id: call for id, call in self._calls.items() if call.tree != tree}
        self._finished = [call for call in self._finished if call.tree != tree]
        return [call.id for call in calls if call.tree == tree]

    def release(self, tree: str) -> Counters | None:
        """Release a search that runs nothing; what it cost, None if it is unknown."""
        self.beam_extension.remove_tree(tree)
        self.steps.forget(tree)
        search = self.searches.get(tree)
        if search is None:
            return None
        search.counters.kv_tokens_peak = self.cache.peaks.get(tree, 0)
        self.cache.release(tree, search.prompt)
        if self.speculation:
            search.counters.flops += self.speculation.draft_model.release(tree, search.prompt)
        self._past += search.counters
        del self.searches[tree]
        return search.counters

    def totals(self) -> Counters:
        """The costs of all searches, past and present."""
        return total_of(self._past, self.searches)

    def _prefix(self, tree: str, branch: Branch, tokens: np.ndarray, foreign: bool) -> SharedPrefix:
        search = self.searches[tree]
        visited = search.prompt is not None and not foreign
        if search.prompt is None or branch.parent == ROOT:
            search.prompt = tokens
        search.name(branch.parent, tokens)
        self.cache.evictor.add_tree(tree, tokens)
        self.cache.evictor.end_step(tree, branch.parent, ROOT, tokens)
        prefix = self.beam_extension.prefix(tree, branch.parent, tokens)
        return prefix or SharedPrefix(tree, tokens, visited=visited)

    def _enqueue(self, tree: str, seqs: Sequence[BranchSequence]) -> None:
        """Queue branches with what beam extension decoded of them; end those that are complete."""
        finishes = [self.beam_extension.claim(seq) for seq in seqs]
        self.beam_extension.start_round(tree)
        for seq, finish in zip(seqs, finishes, strict=True):
            if finish is None:
                self._queues.enqueue(seq)
            else:
                self._end_step(seq, finish)

    def _run_pass(self) -> list[Advance]:
        """Run one forward pass, including draft tokens. A branch's last row and its draft's rows
        count as decoding, the others as prefill."""
        skip = self.speculation.begin_pass(self._queues.running) if self.speculation else set()
        for sequence in self.batch.schedule(skip):
            if sequence is None:
                self._abort_youngest()
            elif not sequence.preemptible:
                self.preemptions += 1
                self._queues.preempt(sequence)
        advances = self.batch.run()
        if self.speculation:
            self.speculation.note_pass(advances)
        charge_pass(self.searches, advances, self._flops)
        for advance in advances:
            counters = self.searches[advance.sequence.tree].counters
            counters.prefilled_tokens += advance.rows
            if advance.logits is not None and isinstance(advance.sequence, BranchSequence):
                counters.prefilled_tokens -= len(advance.logits)
                counters.target_passes += 1
        return advances

    def _abort_youngest(self) -> None:
        """End the youngest decoding search's calls and free its KV; nothing fits beside held KV."""
        assert self.cache.evictor.keeps_held, "a sequence alone does not fit; it was to be refused"
        numbers = {call.tree: self.searches[call.tree].number for call in self._calls.values()}
        tree = max(numbers, key=lambda name: numbers[name])
        error = KvFull(f"kv_tokens: {self.cache.capacity} are all held for searches")
        for call in self.abort(tree):
            self.errors.note(CallError(tree, call, error))
        self.cache.retain(tree, ())

    def _sample_first(self, seqs: Iterable[BranchSequence]) -> None:
        """Sample the first tokens of branches from their prefixes' logits."""
        pairs = [(seq, seq.prefix.logits) for seq in seqs if not seq.output]
        self._sample_next([(seq, logits) for seq, logits in pairs if logits is not None])

    def _sample_next(self, branch_logits: Sequence[tuple[BranchSequence, torch.Tensor]]) -> None:
        """Sample the next tokens of each branch and its followers from the branch's logits:
        (1 + draft tokens, vocab), in row order."""
        outcomes = sample_together(self._sample, branch_logits, self._finish_of)
        for seq, verified, follower_tokens in outcomes:
            if follower_tokens.diverged(verified.tokens):
                self._queues.diverge(seq)
            self._record(seq, verified)
            if follower_tokens.counts:
                self._record_followers(seq, verified, follower_tokens)

    def _finish_of(self, seq: BranchSequence) -> Finish | None:
        """Why a step ends with its last token; None if it goes on. An error ends it as the end of a
        reply does: nothing follows, and nothing is cached."""
        try:
            return self.steps.finish(seq)
        except Exception as error:  # noqa: BLE001  # as in errors.at, which is slow for every token
            self.errors.note(CallError(seq.tree, None, error))
            return Finish.END

    def _record(self, seq: BranchSequence, verified: VerifiedTokens) -> None:
        """Count a branch's new tokens; end its step if it is complete."""
        self.cache.free_children(verified.draft.children)
        verified.count(self.searches[seq.tree].counters)
        if self.speculation:
            self.speculation.note_verified(verified)
        finish = verified.finish
        if finish is None:
            return
        if seq.preemptible:
            self.beam_extension.finish(seq, finish)
        else:
            self._queues.finish(seq, publish=finish is not Finish.END)
            self._end_step(seq, finish)

    def _record_followers(
        self, seq: BranchSequence, verified: VerifiedTokens, follower_tokens: FollowerTokens
    ) -> None:
        """Count followers' new tokens; those that agree follow on, others start or wait alone."""
        counters, token_count = self.searches[seq.tree].counters, sum(follower_tokens.counts)
        counters.deduplicated_tokens += token_count
        counters.decoded_tokens += token_count
        if self.speculation:
            self.speculation.note_followers(verified, follower_tokens)
        for follower, finish in follower_tokens.ended:
            self._end_step(follower, finish)
        for group, (first, *rest) in follower_tokens.groups.items():
            if seq.live and group == verified.tokens:
                seq.followers = [first, *rest]
            elif self._queues.start(first) is None:
                first.followers = rest
            else:
                self._queues.requeue((first, *rest))

    def _end_step(self, seq: BranchSequence, finish: Finish) -> None:
        """Record a finished step, and its call if it was the last; an error fails its search."""
        call = seq.call
        with self.errors.at(seq.tree):
            attention = self._file_step(seq, finish)
            call.steps[seq.index] = self.steps.step(seq, finish, attention)
            call.longest = max(call.longest, len(seq.output))
            call.longest_remaining = max(call.longest_remaining, len(seq.output) - seq.extended)
            if call.complete:
                self.searches[call.tree].passes_saved += call.longest - call.longest_remaining
                self._finished.append(self._calls.pop(call.id))
                ends = any(step is not None and step.finish is Finish.END for step in call.steps)
                if call.diverged and ends:  # nobody needs what the ended branches shared
                    self._retain(call.tree)

    def _file_step(self, seq: BranchSequence, finish: Finish) -> tuple[float, ...]:
        """File a step with search, beam extension and eviction; what its last token attends to."""
        tree, branch, path = seq.tree, seq.branch, seq.path()
        if finish is not Finish.END:
            self.searches[tree].name(branch.node, path)
            self.beam_extension.enqueue(seq, path)
        evictor = self.cache.evictor
        if finish is Finish.END or branch.node < ROOT:  # nothing follows a verdict
            evictor.remove_step(tree, branch.node)
            return ()
        confidence = confidence_of_entropy(seq.entropy, self._vocab)
        return evictor.end_step(tree, branch.node, branch.parent, path, confidence)

    def _retain(self, tree: str) -> None:
        """Free the KV that no live node and no waiting branch of a search will read."""
        unfinished = [seq.path() for seq in self._queues.waiting if seq.tree == tree]
        paths = [*self.searches[tree].alive(), *unfinished]
        self.cache.retain(tree, paths)
        if self.speculation:
            self.speculation.draft_model.cache.retain(tree, paths)

    def _results(self) -> list[ExpandResult]:
        """Take the finished calls, except those of searches that are to be aborted."""
        finished, results, cache = self._finished, [], self.cache
        for call in finished:
            with self.errors.at(call.tree):
                changed = cache.radix.changed_steps(call.tree)
                moved = KvMoved(cache.tokens_of(call.tree), cache.capacity, changed)
                steps = [step for step in call.steps if step is not None]
                results.append(ExpandResult(call.id, steps, call.tree, moved))
        self._finished = [call for call in finished if call.tree in self.errors]
        return [result for result in results if result.tree not in self.errors]


def scheduler_for(
    options: EngineOptions,
    model: Forwards,
    config: ModelConfig,
    clock: Callable[[], float] = time.perf_counter,
    speculation: SpeculativeDecoder | None = None,
    sample: SampleFunction = sample_requests,
) -> Scheduler:
    """A scheduler for a policy model, configured by ``options``. ``clock``: in seconds, by which
    draft lengths are chosen; ``speculation``: replaces the speculative decoder of the options."""
    text = Text(options.policy)
    speculation = speculation or load_speculative_decoder(options, text, clock)
    return Scheduler(options, model, config, text, speculation=speculation, sample=sample)
