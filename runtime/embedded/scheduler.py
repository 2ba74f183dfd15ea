"""Draws steps: all branches of all searches through one batch of one policy model.

A branch waits, its prefix is prefilled (once for all siblings that share it), and from the last
row's logits each sibling draws its own first token and goes on decoding. When a step ends, what it
computed joins the radix tree, unless it ended the reply. Order, batching and memory decide when a
token is drawn, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvpolicy.value import confidence_of_entropy
from runtime.embedded.batch import Advance, Batch, Forwards
from runtime.embedded.beam_extension import BeamExtension
from runtime.embedded.branch_validation import validate_branches
from runtime.embedded.deduplication import (
    FollowerTokens,
    SampleFunction,
    VerifiedTokens,
    sample_together,
    samples_for,
    with_followers,
)
from runtime.embedded.eviction import VALUE_PARAMS, KvPolicy, ValueParams
from runtime.embedded.faults import Faults
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.queues import SequenceQueues
from runtime.embedded.schedule_order import ScheduleOrder, ranks
from runtime.embedded.sequence import (
    BranchSequence,
    ExpandCall,
    ExpandResult,
    SharedPrefix,
    StepBuilder,
)
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from runtime.embedded.tracked_search import TrackedSearch, charge_pass, total_of
from runtime.text import Text
from search.counters import Counters
from search.engine import Branch, Hint, KvMoved, Sampling
from search.tree import ROOT, Finish

PREFILL_ROWS = 256


class Scheduler:
    """The branches of one policy model: waiting, running, and what searches hold."""

    def __init__(
        self,
        forward: Forwards,
        text: Text,
        *,
        context: int,
        vocab: int,
        kv_tokens: int,
        batch_limit: int,
        flops: Callable[[int, int, int], float],
        kv_policy: KvPolicy = "lru",
        speculation: SpeculativeDecoder | None = None,
        values: ValueParams = VALUE_PARAMS,
        speculate: bool = False,
        visits: ScheduleOrder = "prefix",
        dedup: bool = True,
        draw: SampleFunction = samples_for,
    ) -> None:
        """``context``: the longest sequence; ``vocab``: token ids are below it;
        ``flops(tokens, context_sum, logits)``: the cost of a forward; ``speculation``: what drafts
        ahead of the draws, None if nothing does; ``speculate``: idle places are filled with what
        rounds may ask for next; ``visits``: the order in which a round's branches are let in;
        ``dedup``: what several have drawn alike is computed once; ``draw``: how tokens are
        sampled."""
        if batch_limit < 1:
            raise ValueError(f"batch_limit: {batch_limit}; at least 1 is needed")
        self.cache = PrefixCache(kv_tokens, kv_policy, values)
        self.batch = Batch(
            forward,
            self.cache,
            limit=batch_limit,
            rows=PREFILL_ROWS,
        )
        self.accounts: dict[str, TrackedSearch] = {}
        self.past = Counters()
        self.preemptions = 0
        self._starved: list[int] = []
        self.faults = Faults()
        """Searches whose calls get no answer: they are to be aborted and released."""
        self._draw = draw
        self._steps = StepBuilder(text)
        self._context = context
        self._vocab = vocab
        self._visits: ScheduleOrder = visits
        self._flops = flops
        self.speculation = speculation
        self._queues = SequenceQueues(self.batch, self.accounts, speculation, dedup=dedup)
        self.expansion = BeamExtension(
            self.batch, self._queues, self.accounts, self._steps, on=speculate
        )
        self._calls: dict[int, ExpandCall] = {}
        self._finished: list[ExpandCall] = []
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to draw or to answer."""
        return bool(self._calls or self._finished)

    @property
    def running(self) -> int:
        """Branches in the batch."""
        return sum(len(with_followers(run)) for run in self._queues.runs)

    @property
    def waiting(self) -> int:
        """Branches that wait for memory, their prefix or a place in the batch."""
        return len(self._queues.waiting)

    def expand(
        self,
        call_id: int,
        tree: str,
        branches: Sequence[Branch],
        sampling: Sampling,
        *,
        fresh: bool = False,
    ) -> None:
        """Take on a round. Raises EngineError if a branch can never run.

        ``fresh``: its prefixes do not follow from what was drawn here before.
        """
        rooms = {"context": self._context, "kv_tokens": self.cache.capacity}
        tokens = validate_branches(branches, sampling, self._vocab, rooms)
        account = self._account(tree)
        self._arrivals += 1
        stops, nothing = self._steps.stops(sampling), [None] * len(branches)
        call = ExpandCall(call_id, self._arrivals, tree, sampling, stops, [*nothing])
        self._calls[call_id] = call
        prefixes: dict[tuple[int, ...], SharedPrefix] = {}
        runs = []
        places = ranks(branches, self._visits)
        for index, (branch, place) in enumerate(zip(branches, places, strict=True)):
            prefix = prefixes.get(branch.tokens)
            if prefix is None:
                prefix = self._prefix(tree, account, branch, tokens[index], fresh)
                prefixes[branch.tokens] = prefix
            order = (account.number, call.number, place)
            runs.append(BranchSequence(call, index, branch, prefix, order))
        self._begin(tree, runs)
        if not runs:
            self._finished.append(self._calls.pop(call_id))

    def step(self) -> list[ExpandResult]:
        """One iteration: admit, run one forward pass, draw; the calls that are finished."""
        if self._queues.waiting:
            self.expansion.pause_all()
            admitted = self._queues.admit()
            ready = [(run, run.prefix.logits) for run in admitted if not run.drawn]
            self._draw_next([(run, logits) for run, logits in ready if logits is not None])
        if not self._queues.waiting and self.batch.sequences:
            begun = [(run, run.prefix.logits) for run in self.expansion.fill_idle_places()]
            self._draw_next([(run, logits) for run, logits in begun if logits is not None])
        landed = []
        advances = self._advance()
        self._charge(advances)
        for advance in advances:
            if advance.logits is None:
                continue
            work = advance.sequence
            if isinstance(work, BranchSequence):
                beside = [logits for _, logits in advance.beside]
                landed.append((work, torch.cat([advance.logits, *beside])))
            elif isinstance(work, SharedPrefix):
                work.logits = advance.logits.clone()
                self._queues.finish(work)
        self._draw_next(landed)
        if self.speculation:
            self.speculation.drawn()
        return self._answers()

    def check(self) -> None:
        """Raise AssertionError unless the books of all caches are right."""
        self.cache.check(self.accounts)
        if self.speculation:
            self.speculation.drafter.cache.check(self.accounts)

    def starved(self) -> list[int]:
        """The calls that got no answer since the last look, for want of KV."""
        starved, self._starved = self._starved, []
        return starved

    def hint(self, tree: str, hint: Hint) -> None:
        """Free what the search has pruned."""
        account = self.accounts.get(tree)
        if account is None:
            return
        self.expansion.mark_dead(tree, hint.dead)
        self.cache.evictor.hint(tree, hint)
        if account.mark_dead(hint.dead):
            self._retain(tree)

    def mean_logprob(
        self, tree: str, prompt: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> float:
        """Mean log-probability a token of steps drawn here. Raises KeyError for others."""
        path = np.asarray(prompt, dtype=np.int64)
        return self._steps.mean_logprob(tree, path, steps)

    def abort(self, tree: str) -> list[int]:
        """Stop a search's branches; the ids of the calls that get no answer."""
        self.expansion.remove_tree(tree)
        self._queues.remove_tree(tree)
        calls = [*self._calls.values(), *self._finished]
        self._calls = {id: call for id, call in self._calls.items() if call.tree != tree}
        self._finished = [call for call in self._finished if call.tree != tree]
        return [call.id for call in calls if call.tree == tree]

    def release(self, tree: str) -> Counters | None:
        """Let go of a search that runs nothing; what it cost, None if it was never here."""
        self.expansion.remove_tree(tree)
        account = self.accounts.get(tree)
        self._steps.forget(tree)
        if account is None:
            return None
        account.counters.kv_tokens_peak = self.cache.peaks.get(tree, 0)
        self.cache.release(tree, account.prompt)
        if self.speculation:
            account.counters.flops += self.speculation.drafter.release(tree, account.prompt)
        self.past += account.counters
        del self.accounts[tree]
        return account.counters

    def totals(self) -> Counters:
        """The costs of all searches, past and present."""
        return total_of(self.past, self.accounts)

    def _retain(self, tree: str) -> None:
        """Free what nothing that lives or draws will read."""
        unfinished = [run.path() for run in self._queues.waiting if run.tree == tree]
        wanted = [*self.accounts[tree].alive(), *unfinished]
        self.cache.retain(tree, wanted)
        if self.speculation:
            self.speculation.drafter.cache.retain(tree, wanted)

    def _account(self, tree: str) -> TrackedSearch:
        if tree not in self.accounts:
            self._arrivals += 1
            self.accounts[tree] = TrackedSearch(self._arrivals)
        return self.accounts[tree]

    def _prefix(
        self, tree: str, account: TrackedSearch, branch: Branch, tokens: np.ndarray, fresh: bool
    ) -> SharedPrefix:
        visited = account.prompt is not None and not fresh
        if account.prompt is None or branch.parent == ROOT:
            account.prompt = tokens
        account.name(branch.parent, tokens)
        self.cache.evictor.add_tree(tree, tokens)
        self.cache.evictor.end_step(tree, branch.parent, ROOT, tokens)
        return self.expansion.prefix(tree, branch.parent, tokens) or SharedPrefix(
            tree, tokens, visited=visited
        )

    def _begin(self, tree: str, runs: Sequence[BranchSequence]) -> None:
        """Let branches wait with what was drawn for them early; end those whose step that is."""
        finishes = [self.expansion.claim(run) for run in runs]
        self.expansion.start_round(tree)
        for run, finish in zip(runs, finishes, strict=True):
            if finish is None:
                self._queues.enqueue(run)
            else:
                self._end(run, finish)

    def _advance(self) -> list[Advance]:
        """One forward pass, over the draft's proposals too where there is one."""
        held = self.speculation.begin(self._queues.runs) if self.speculation else set()
        for sequence in self.batch.schedule(held):
            if sequence is None:
                self._starve()
            elif not sequence.spare:
                self.preemptions += 1
                self._queues.preempt(sequence)
        advances = self.batch.run()
        if self.speculation:
            self.speculation.ran(advances)
        return advances

    def _starve(self) -> None:
        """Nothing fits beside what searches hold: the youngest that draws now loses all it has."""
        assert self.cache.evictor.keeps_held, "a sequence alone does not fit; it was to be refused"
        numbers = {call.tree: self.accounts[call.tree].number for call in self._calls.values()}
        tree = max(numbers, key=lambda name: numbers[name])
        self._starved += self.abort(tree)
        self.cache.retain(tree, ())

    def _answers(self) -> list[ExpandResult]:
        """The calls that are finished, but those of searches that are to be aborted."""
        finished, found = self._finished, []
        for call in finished:
            with self.faults.at(call.tree):
                found.append(self._drawn(call))
        self._finished = [call for call in finished if call.tree in self.faults]
        return [drawn for drawn in found if drawn.tree not in self.faults]

    def _drawn(self, call: ExpandCall) -> ExpandResult:
        tree, cache = call.tree, self.cache
        moved = KvMoved(cache.tokens_of(tree), cache.capacity, cache.radix.changed_steps(tree))
        return ExpandResult(call.id, [step for step in call.steps if step is not None], tree, moved)

    def _finish(self, run: BranchSequence) -> Finish | None:
        """Why a step ends with its last token; None if it goes on. A fault ends it, as a reply
        ends: nothing follows, and nothing is cached."""
        with self.faults.at(run.tree):
            return self._steps.finish(run)
        return Finish.END

    def _draw_next(self, rows: Sequence[tuple[BranchSequence, torch.Tensor]]) -> None:
        """Draw each run's next tokens from its logits: (1 + guesses, vocab), in their order; and
        those of the branches that follow it."""
        for run, taken, followed in sample_together(self._draw, rows, self._finish):
            if followed.parted(taken.tokens):
                self._queues.diverge(run)
            self._take(run, taken)
            if followed.given:
                self._follow(run, taken, followed)

    def _follow(self, run: BranchSequence, taken: VerifiedTokens, followed: FollowerTokens) -> None:
        """Book what those were given that followed a run; who still agrees with it follows on."""
        counters, drawn = self.accounts[run.tree].counters, sum(followed.given)
        counters.deduplicated_tokens += drawn
        counters.decoded_tokens += drawn
        if self.speculation:
            self.speculation.followed(taken, followed)
        for one, finish in followed.ended:
            self._end(one, finish)
        for tokens, (first, *rest) in followed.ways.items():
            if run.live and tokens == taken.tokens:
                run.following = [first, *rest]
            elif self._queues.start(first) is None:
                first.following = rest
            else:
                self._queues.requeue((first, *rest))

    def _take(self, run: BranchSequence, taken: VerifiedTokens) -> None:
        """Book what a run was given; end the step if it is complete."""
        self.cache.prune(taken.guesses.forks)
        self.accounts[run.tree].take(taken)
        if self.speculation:
            self.speculation.took(taken)
        if taken.finish is not None:
            self._close(run, taken.finish)

    def _close(self, run: BranchSequence, finish: Finish) -> None:
        """A branch has drawn its step's last token."""
        if run.spare:
            self.expansion.finish(run, finish)
        else:
            self._queues.finish(run, publish=finish is not Finish.END)
            self._end(run, finish)

    def _end(self, run: BranchSequence, finish: Finish) -> None:
        """File a finished step, and its call if it was the last; a fault is its search's own."""
        with self.faults.at(run.tree):
            self._file(run, finish)

    def _file(self, run: BranchSequence, finish: Finish) -> None:
        call, branch, path, attention = run.call, run.branch, run.path(), ()
        if finish is not Finish.END:
            self.accounts[call.tree].name(branch.node, path)
            self.expansion.enqueue(run, path)
        evictor = self.cache.evictor
        if finish is Finish.END or branch.node < ROOT:  # a verdict is nobody's parent
            evictor.remove_step(call.tree, branch.node)
        else:
            confidence = confidence_of_entropy(run.entropy, self._vocab)
            attention = evictor.end_step(call.tree, branch.node, branch.parent, path, confidence)
        call.steps[run.index] = self._steps.step(run, finish, attention)
        call.longest = max(call.longest, len(run.drawn))
        call.left = max(call.left, len(run.drawn) - run.taken)
        if call.done:
            self.accounts[call.tree].passes_saved += call.longest - call.left
            del self._calls[call.id]
            self._finished.append(call)
            ends = any(step is not None and step.finish is Finish.END for step in call.steps)
            if call.parted and ends:  # what was shared of these is nobody's
                self._retain(call.tree)

    def _charge(self, advances: Sequence[Advance]) -> None:
        """Book a pass: a branch's last row and its guesses decode, the others are prefill."""
        charge_pass(self.accounts, advances, self._flops)
        for done in advances:
            counters = self.accounts[done.sequence.tree].counters
            counters.prefilled_tokens += done.rows
            if done.logits is not None and isinstance(done.sequence, BranchSequence):
                counters.prefilled_tokens -= len(done.logits)
                counters.target_passes += 1
