"""The draft model: proposes how branches may go on, from KV of its own that shares their prefixes.

It proposes what it would sample itself under the noise that the branch will be sampled with. What
it says costs or saves time; it is never part of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import torch

from runtime.embedded.batch import Advance, Batch, Forwards
from runtime.embedded.draft_tree import DraftBranch, DraftTree
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.sampler import rank_candidates
from runtime.embedded.sequence import BranchSequence, TokenSequence
from runtime.embedded.tracked_search import pass_flops

PREFILL_ROWS = 256


class DraftModel:
    """The branches' continuations in the draft model's cache, a sequence for each."""

    noise = 0
    """Exclusive or with a branch's seed: the noise its draft tokens are sampled by. 0: its own."""

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
    ) -> None:
        """``context``: the longest sequence; branches that may outgrow it or ``kv_tokens`` get no
        proposals. ``flops(tokens, context_sum, logits)``: the cost of a forward. ``timed`` hears of
        each pass: its rows and its seconds by ``clock``."""
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

    def rank(self, ways: Sequence[DraftWay], logits: torch.Tensor) -> list[list[int]]:
        """The next draft tokens after each way, the likeliest first, from its row of ``logits``
        (ways, vocab)."""
        samplings = [sketch.run.call.sampling for sketch, _ in ways]
        return rank_candidates(
            logits,
            np.array([sketch.run.branch.seed ^ self.noise for sketch, _ in ways], dtype=np.uint64),
            np.array([sketch.position(way) for sketch, way in ways], dtype=np.int64),
            np.array([sampling.temperature for sampling in samplings]),
            np.array([sampling.top_p for sampling in samplings]),
            max(sketch.width(way) for sketch, way in ways),
        ).tolist()

    def _grow(self, passed: Sequence[tuple[DraftTreeBuilder, Advance]]) -> None:
        """Add to each sketch what the draft model foresees after this pass."""
        ways: list[DraftWay] = []
        rows: list[torch.Tensor] = []
        for sketch, advance in passed:
            if advance.logits is not None:
                ways.append((sketch, None))
                rows.append(advance.logits[-1:])
            ways += [(sketch, fork) for fork, _ in advance.beside]
            rows += [logits[-1:] for _, logits in advance.beside]
        if ways:
            for (sketch, way), ranked in zip(ways, self.rank(ways, torch.cat(rows)), strict=True):
                sketch.extend(way, ranked)

    def _pass(self, held: Set[TokenSequence] = frozenset()) -> list[Advance]:
        """A pass over all sequences but those ``held`` back. Whose sequence loses its place to
        older ones goes without proposals."""
        for sequence in self._batch.schedule(held):
            assert sequence is not None, "the draft's cache may evict everything"
            self._filling.discard(sequence)
            for run in [run for run, its in self._sequences.items() if its is sequence]:
                del self._sequences[run]
        return self._batch.run()


class DraftTreeBuilder:
    """The ways of one branch; all of them are equally deep until they end."""

    def __init__(
        self,
        run: BranchSequence,
        sequence: TokenSequence,
        widths: Sequence[int],
        eos: frozenset[int],
    ) -> None:
        """``widths``: how many tokens to guess at each depth, after each guess before it."""
        self.run = run
        self._sequence = sequence
        self._widths = widths
        self._eos = eos
        self._last: dict[DraftBranch | None, int] = {}
        self._tips: list[DraftBranch] = []

    def position(self, way: DraftBranch | None) -> int:
        """The absolute position of the token that comes next on a way."""
        return self._sequence.known + self.depth(way)

    def width(self, way: DraftBranch | None) -> int:
        """How many tokens to guess next on a way."""
        return self._widths[self.depth(way)]

    def extend(self, way: DraftBranch | None, ranked: Sequence[int]) -> None:
        """The likeliest of ``ranked`` lengthens the way, the others fork off, as many as are
        wanted. What would end the step is not worth a row: the draw after the guesses tells."""
        depth = self.depth(way)
        before = [*self.run.drawn, *self._tokens(way)]
        wanted = [token for token in ranked[: self._widths[depth]] if token >= 0]
        going_on = [token for token in wanted if not self._ends([*before, token])]
        deepest = depth + 1 == len(self._widths)
        for rank, token in enumerate(going_on):
            if rank:
                tip = DraftBranch(way, depth, [token])
                (self._tips if deepest else self._sequence.forks).append(tip)
            elif deepest:
                self._last[way] = token  # nothing follows it, so the draft need not read it
            elif way is None:
                self._sequence.guess(token)
            else:
                way.tokens.append(token)

    def done(self, cache: PrefixCache) -> DraftTree:
        """The guesses; the sequence keeps what was computed of the chain. Forks go no deeper than
        the chain, so that they fit its places."""
        sequence = self._sequence
        tokens, forks = self._tokens(None), sequence.forks
        cache.prune(forks)
        sequence.forks, sequence.proposed = [], 0
        for way, token in self._last.items():
            (tokens if way is None else way.tokens).append(token)
        kept: list[DraftBranch] = []
        for fork in [*forks, *self._tips]:
            fork.tokens = fork.tokens[: max(0, len(tokens) - fork.at)]
            if fork.tokens and (fork.above is None or fork.above in kept):
                kept.append(fork)
        return DraftTree(tokens, kept)

    def depth(self, way: DraftBranch | None) -> int:
        """Draft tokens on a way so far."""
        return self._sequence.proposed if way is None else way.depth

    def _tokens(self, way: DraftBranch | None) -> list[int]:
        """All guesses on a way."""
        if way is None:
            return self._sequence.tokens[self._sequence.known : self._sequence.length].tolist()
        return [*self._tokens(way.above)[: way.at], *way.tokens]

    def _ends(self, tokens: Sequence[int]) -> bool:
        """Whether a step would end with the last of these tokens."""
        return tokens[-1] in self._eos or self.run.call.stops.ended(tokens)


DraftWay = tuple[DraftTreeBuilder, DraftBranch | None]
"""A branch's draft tree, and a way in it that ends where the next token is asked for."""
