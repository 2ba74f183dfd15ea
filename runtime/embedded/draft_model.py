"""The draft model: proposes how branches may go on, from KV of its own that shares their prefixes.

It proposes what it would draw itself under the noise that the branch will be drawn with. What it
says costs or saves time; it is never part of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import torch

from runtime.embedded.batch import Advance, Batch, Forwards
from runtime.embedded.draft_tree import DraftBranch, DraftTree
from runtime.embedded.draft_tree_builder import DraftTreeBuilder
from runtime.embedded.expand_call import BranchSequence
from runtime.embedded.options import DraftRule
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.rejection_sampling import candidate_seeds, distribution
from runtime.embedded.sampler import rank_candidates
from runtime.embedded.sequence import TokenSequence
from runtime.embedded.tracked_search import pass_flops

PREFILL_ROWS = 256


class DraftModel:
    """The branches' continuations in the draft model's cache, a sequence for each."""

    def __init__(
        self,
        forward: Forwards,
        *,
        context: int,
        kv_tokens: int,
        batch_limit: int,
        eos: frozenset[int],
        flops: Callable[[int, int, int], float],
        timed: Callable[[int, float], None],
        clock: Callable[[], float],
        rule: DraftRule = "coupled",
    ) -> None:
        """``context``: the longest sequence; branches that may outgrow it or ``kv_tokens`` get no
        proposals. ``flops(tokens, context_sum, logits)``: the cost of a forward. ``timed`` hears of
        each pass: its rows and its seconds by ``clock``. ``rule``: under ``leviathan`` what is
        guessed is drawn by noise of its own, and goes with the distribution it was drawn from."""
        self.cache = PrefixCache(kv_tokens)
        self._batch = Batch(
            forward,
            self.cache,
            limit=2 * batch_limit,
            rows=PREFILL_ROWS,
        )
        self._room = min(context, kv_tokens)
        self._eos = eos
        self._flops = flops
        self.rejects = rule == "leviathan"
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._timed = timed
        self._clock = clock
        self._since = 0.0
        self._sequences: dict[BranchSequence, TokenSequence] = {}
        self._filling: set[TokenSequence] = set()

    def propose(
        self, wishes: Mapping[BranchSequence, Sequence[int]]
    ) -> dict[BranchSequence, DraftTree]:
        """Guesses for each branch. A wish says how many tokens to guess after each of the first
        guess's depths (at least one depth); none comes after one that ends a step."""
        self._since = self._clock()
        fitting = [run for run in wishes if run.size <= self._room]
        for run in fitting:
            self._follow(run)
        self._enter([run for run in fitting if run not in self._sequences])
        drafting = {
            self._sequences[run]: DraftTreeBuilder(
                run, self._sequences[run], wishes[run], self._eos
            )
            for run in fitting
            if run in self._sequences
        }
        while advances := self._pass():
            self._grow([(drafting[advance.sequence], advance) for advance in advances])
            self._note(advances)
        found = {sketch.run: sketch.done(self.cache) for sketch in drafting.values()}
        return {run: found.get(run) or DraftTree() for run in wishes}

    def diverge(self, run: BranchSequence) -> None:
        """Others go on from what a branch has drawn: what was computed of it is theirs too."""
        sequence = self._sequences.get(run)
        if sequence is not None:
            self._follow(run)
            sequence.length = sequence.computed  # no pass is to compute more before the next wish
            self.cache.share(sequence)

    def end(self, run: BranchSequence, *, publish: bool) -> None:
        """A branch has ended or lost its place; its KV stays cached unless nothing can follow."""
        if run not in self._sequences:
            return
        if publish:
            self._follow(run)
            self._batch.publish(self._sequences.pop(run))
        else:
            self._batch.drop(self._sequences.pop(run))

    def release(self, tree: str, prompt: np.ndarray | None) -> float:
        """Let go of a search without branches; what drafting for it cost, in flops."""
        self.cache.release(tree, prompt)
        return self._spent.pop(tree, 0.0)

    def _follow(self, run: BranchSequence) -> None:
        """Make the branch's sequence hold what was drawn, the last token still to be computed."""
        sequence = self._sequences.get(run)
        if sequence is None:
            return
        known = run.path()
        same = common_prefix(sequence.tokens[: sequence.computed], known)
        sequence.tokens[: len(known)] = known
        sequence.length = len(known)
        sequence.computed = min(same, sequence.length - 1)

    def _enter(self, runs: Sequence[BranchSequence]) -> None:
        """Lanes for branches that have none, each distinct prefix computed once for all of them."""
        firsts = {(namespace_of(run.tree), run.prefix.tokens.tobytes()): run for run in runs}
        self._fill(list(firsts.values()))
        for run in runs:
            tokens = run.path()
            sequence = TokenSequence(run.tree, run.order, run.size)
            if self._batch.enter(sequence, tokens, len(tokens) - 1) is None:
                self._sequences[run] = sequence

    def _fill(self, waiting: list[BranchSequence]) -> None:
        """Compute and publish the prefixes of these branches, as far as there is room."""
        while waiting or self._filling:
            waiting = [run for run in waiting if not self._start(run)]
            for sequence in [sequence for sequence in self._filling if not sequence.missing]:
                self._filling.remove(sequence)
                self._batch.publish(sequence)
            if not self._filling:
                return
            self._note(self._pass(set(self._sequences.values())))

    def _start(self, run: BranchSequence) -> bool:
        """Have a branch's prefix computed; False while it has to wait."""
        prefix = run.prefix.tokens
        sequence = TokenSequence(run.tree, run.order, len(prefix))
        if self._batch.enter(sequence, prefix, len(prefix)) is not None:
            return False
        self._filling.add(sequence)
        return True

    def _note(self, advances: Sequence[Advance]) -> None:
        """Tell the time since the last pass, and book it."""
        for done in advances:
            self._spent[done.sequence.tree] += pass_flops(done, self._flops)
        before, self._since = self._since, self._clock()
        self._timed(sum(advance.all_rows for advance in advances), self._since - before)

    def _grow(self, passed: Sequence[tuple[DraftTreeBuilder, Advance]]) -> None:
        """Add to each sketch what the draft model foresees after this pass."""
        ways: list[tuple[DraftTreeBuilder, DraftBranch | None, torch.Tensor]] = []
        for sketch, advance in passed:
            if advance.logits is not None:
                ways.append((sketch, None, advance.logits[-1:]))
            ways += [(sketch, fork, logits[-1:]) for fork, logits in advance.beside]
        if not ways:
            return
        seeds = [sketch.run.branch.seed for sketch, *_ in ways]
        samplings = [sketch.run.call.sampling for sketch, *_ in ways]
        logits = torch.cat([logits for *_, logits in ways]).numpy()
        ranked = rank_candidates(
            logits,
            candidate_seeds(seeds) if self.rejects else np.array(seeds, dtype=np.uint64),
            np.array([sketch.position(way) for sketch, way, _ in ways], dtype=np.int64),
            np.array([sampling.temperature for sampling in samplings]),
            np.array([sampling.top_p for sampling in samplings]),
            max(sketch.width(way) for sketch, way, _ in ways),
        ).tolist()
        for i, (sketch, way, _) in enumerate(ways):
            if self.rejects:
                sampling = samplings[i]
                q = distribution(logits[i], sampling.temperature, sampling.top_p)
                sketch.offer(way, ranked[i], q)
            sketch.extend(way, ranked[i])

    def _pass(self, held: Set[TokenSequence] = frozenset()) -> list[Advance]:
        """A pass over all sequences but those ``held`` back. Whose sequence loses its place to
        older ones goes without proposals."""
        for sequence in self._batch.schedule(held):
            assert sequence is not None, "the draft's cache may evict everything"
            self._filling.discard(sequence)
            for run in [run for run, its in self._sequences.items() if its is sequence]:
                del self._sequences[run]
        return self._batch.run()
