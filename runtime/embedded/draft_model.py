"""The draft model: proposes how branches may go on, from KV of its own that shares their prefixes.

It proposes what it would sample itself under the noise that the branch will be sampled with. What
it proposes costs or saves time; it is never part of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import torch

from runtime.embedded.batch import Advance, Batch, Forwards
from runtime.embedded.draft_length import PassTime
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.options import EngineOptions
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.sampler import rank_candidates
from runtime.embedded.sequence import BranchSequence, DraftChain, DraftTree, TokenSequence


class DraftModel:
    """The branches' continuations in the draft model's cache, a sequence for each."""

    noise = 0
    """Exclusive or with a branch's seed: the noise its draft tokens are sampled by. 0: its own."""

    def __init__(
        self,
        options: EngineOptions,
        forward: Forwards,
        config: ModelConfig,
        *,
        eos: frozenset[int],
        pass_time: PassTime,
        clock: Callable[[], float],
    ) -> None:
        """``config``: the draft model's; branches that may outgrow its context or its KV get no
        drafts. ``pass_time``: what each pass takes by ``clock`` is added to it."""
        self.cache = PrefixCache(options.draft_kv_tokens)
        self._batch = Batch(forward, self.cache, limit=2 * options.batch_limit)
        self._longest = min(config.context, options.draft_kv_tokens)
        self._eos = eos
        self._flops = config.flops
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._pass_time = pass_time
        self._clock = clock
        self._since = 0.0
        self._sequences: dict[BranchSequence, TokenSequence] = {}
        self._prefixes: set[TokenSequence] = set()

    def propose(
        self, widths: Mapping[BranchSequence, Sequence[int]]
    ) -> dict[BranchSequence, DraftTree]:
        """A draft for each branch. ``widths``: how many tokens to draft at each depth (at least one
        depth), after each draft token before it; none comes after one that ends a step."""
        self._since = self._clock()
        fitting = [seq for seq in widths if seq.size <= self._longest]
        for seq in fitting:
            self._catch_up(seq)
        self._enter([seq for seq in fitting if seq not in self._sequences])
        builders = {
            sequence: DraftTreeBuilder(seq, sequence, widths[seq], self._eos)
            for seq in fitting
            if (sequence := self._sequences.get(seq)) is not None
        }
        while advances := self._pass():
            self._grow([(builders[advance.sequence], advance) for advance in advances])
            self._note(advances)
        drafts = {builder.seq: builder.build(self.cache) for builder in builders.values()}
        return {seq: drafts.get(seq) or DraftTree() for seq in widths}

    def rank(self, tips: Sequence[DraftTip], logits: torch.Tensor) -> list[list[int]]:
        """The next draft tokens after each tip, the likeliest first, from its row of ``logits``
        (tips, vocab)."""
        seqs = [builder.seq for builder, _ in tips]
        ranked = rank_candidates(
            logits,
            np.array([seq.branch.seed ^ self.noise for seq in seqs], dtype=np.uint64),
            np.array([builder.position(chain) for builder, chain in tips], dtype=np.int64),
            np.array([seq.call.sampling.temperature for seq in seqs]),
            np.array([seq.call.sampling.top_p for seq in seqs]),
            max(builder.width(chain) for builder, chain in tips),
        ).tolist()
        for place, (builder, chain) in enumerate(tips):
            seq, processors = builder.seq, builder.seq.call.processors
            if processors is not None:
                path, seed = builder.path(chain), seq.branch.seed ^ self.noise
                row, count = logits[place].numpy(), builder.width(chain)
                ranked[place] = processors.rank(path, seed, row, count)
        return ranked

    def diverge(self, seq: BranchSequence) -> None:
        """Others go on from what a branch has sampled: what was computed of it is theirs too."""
        sequence = self._sequences.get(seq)
        if sequence is not None:
            self._catch_up(seq)
            sequence.length = sequence.computed  # no pass is to compute more before the next draft
            self.cache.share(sequence)

    def end(self, seq: BranchSequence, *, publish: bool) -> None:
        """A branch has ended or was preempted; its KV stays cached unless nothing can follow."""
        if seq not in self._sequences:
            return
        if publish:
            self._catch_up(seq)
        (self._batch.publish if publish else self._batch.drop)(self._sequences.pop(seq))

    def release(self, tree: str, prompt: np.ndarray | None) -> float:
        """Let go of a search without branches; what drafting for it cost, in flops."""
        self.cache.release(tree, prompt)
        return self._spent.pop(tree, 0.0)

    def _catch_up(self, seq: BranchSequence) -> None:
        """Make a branch's sequence hold its tokens, the last one still to be computed."""
        sequence = self._sequences.get(seq)
        if sequence is None:
            return
        tokens = seq.path()
        same = common_prefix(sequence.tokens[: sequence.computed], tokens)
        sequence.tokens[: len(tokens)] = tokens
        sequence.length = len(tokens)
        sequence.computed = min(same, sequence.length - 1)

    def _enter(self, seqs: Sequence[BranchSequence]) -> None:
        """Sequences for branches without one, each distinct prefix computed once for all."""
        firsts = {(namespace_of(seq.tree), seq.prefix.tokens.tobytes()): seq for seq in seqs}
        self._prefill(list(firsts.values()))
        for seq in seqs:
            tokens = seq.path()
            sequence = TokenSequence(seq.tree, seq.order, seq.size)
            if self._batch.enter(sequence, tokens, len(tokens) - 1) is None:
                self._sequences[seq] = sequence

    def _prefill(self, waiting: list[BranchSequence]) -> None:
        """Compute and publish the prefixes of these branches, as far as there is room."""
        while waiting or self._prefixes:
            waiting = [seq for seq in waiting if not self._start_prefix(seq)]
            for sequence in [prefix for prefix in self._prefixes if not prefix.missing]:
                self._prefixes.remove(sequence)
                self._batch.publish(sequence)
            if not self._prefixes:
                return
            self._note(self._pass(set(self._sequences.values())))

    def _start_prefix(self, seq: BranchSequence) -> bool:
        """Have a branch's prefix computed; False while it has to wait."""
        prefix = seq.prefix.tokens
        sequence = TokenSequence(seq.tree, seq.order, len(prefix))
        if self._batch.enter(sequence, prefix, len(prefix)) is not None:
            return False
        self._prefixes.add(sequence)
        return True

    def _grow(self, passed: Sequence[tuple[DraftTreeBuilder, Advance]]) -> None:
        """Add to each draft what the draft model proposes after this pass."""
        tips: list[DraftTip] = []
        rows: list[torch.Tensor] = []
        for builder, advance in passed:
            if advance.logits is not None:
                tips.append((builder, None))
                rows.append(advance.logits[-1:])
            tips += [(builder, child) for child, _ in advance.children]
            rows += [logits[-1:] for _, logits in advance.children]
        ranked = self.rank(tips, torch.cat(rows)) if tips else []
        for (builder, chain), tokens in zip(tips, ranked, strict=True):
            builder.extend(chain, tokens)

    def _note(self, advances: Sequence[Advance]) -> None:
        """Tell the time since the last pass, and count its cost."""
        for advance in advances:
            self._spent[advance.sequence.tree] += advance.flops(self._flops)
        before, self._since = self._since, self._clock()
        self._pass_time.add(sum(advance.all_rows for advance in advances), self._since - before)

    def _pass(self, held: Set[TokenSequence] = frozenset()) -> list[Advance]:
        """A pass over all sequences but those ``held`` back. What is preempted gets no draft."""
        for sequence in self._batch.schedule(held):
            assert sequence is not None, "the draft's cache may evict everything"
            self._prefixes.discard(sequence)
            for seq in [seq for seq, its in self._sequences.items() if its is sequence]:
                del self._sequences[seq]
        return self._batch.run()


class DraftTreeBuilder:
    """The draft of one branch; all its chains are equally deep until they end."""

    def __init__(
        self,
        seq: BranchSequence,
        sequence: TokenSequence,
        widths: Sequence[int],
        eos: frozenset[int],
    ) -> None:
        """``sequence``: the branch's in the draft model's cache; ``widths``: how many tokens to
        draft at each depth, after each draft token before it."""
        self.seq = seq
        self._sequence = sequence
        self._widths = widths
        self._eos = eos
        self._last: dict[DraftChain | None, int] = {}
        self._leaves: list[DraftChain] = []

    def depth(self, chain: DraftChain | None) -> int:
        """Draft tokens on a chain so far."""
        return self._sequence.draft_count if chain is None else chain.depth

    def position(self, chain: DraftChain | None) -> int:
        """The absolute position of the token that comes next on a chain."""
        return self._sequence.committed + self.depth(chain)

    def width(self, chain: DraftChain | None) -> int:
        """How many tokens to draft next on a chain."""
        return self._widths[self.depth(chain)]

    def path(self, chain: DraftChain | None) -> np.ndarray:
        """The branch's tokens and all draft tokens on a chain, int64."""
        return self.seq.path(self._tokens(chain))

    def extend(self, chain: DraftChain | None, ranked: Sequence[int]) -> None:
        """The likeliest of ``ranked`` lengthens the chain, the others begin children, as many as
        are wanted. What would end the step is not worth a row: the sample after the draft shows."""
        depth = self.depth(chain)
        before = [*self.seq.output, *self._tokens(chain)]
        wanted = [token for token in ranked[: self._widths[depth]] if token >= 0]
        going_on = [token for token in wanted if not self._ends([*before, token])]
        deepest = depth + 1 == len(self._widths)
        for rank, token in enumerate(going_on):
            if rank:
                child = DraftChain(chain, depth, [token])
                (self._leaves if deepest else self._sequence.children).append(child)
            elif deepest:
                self._last[chain] = token  # nothing follows it, so the draft model need not read it
            elif chain is None:
                self._sequence.append_draft(token)
            else:
                chain.tokens.append(token)

    def build(self, cache: PrefixCache) -> DraftTree:
        """The draft; the sequence keeps what was computed of the main chain. Children go no deeper
        than it, so that they fit its places."""
        sequence = self._sequence
        tokens, children = self._tokens(None), sequence.children
        cache.free_children(children)
        sequence.children, sequence.draft_count = [], 0
        for chain, token in self._last.items():
            (tokens if chain is None else chain.tokens).append(token)
        kept: list[DraftChain] = []
        for child in [*children, *self._leaves]:
            child.tokens = child.tokens[: max(0, len(tokens) - child.at)]
            if child.tokens and (child.parent is None or child.parent in kept):
                kept.append(child)
        return DraftTree(tokens, kept)

    def _tokens(self, chain: DraftChain | None) -> list[int]:
        """All draft tokens on a chain."""
        if chain is None:
            return self._sequence.tokens[self._sequence.committed : self._sequence.length].tolist()
        return [*self._tokens(chain.parent)[: chain.at], *chain.tokens]

    def _ends(self, tokens: Sequence[int]) -> bool:
        """Whether a step would end with the last of these tokens."""
        return tokens[-1] in self._eos or self.seq.call.stops.ended(tokens)


DraftTip = tuple[DraftTreeBuilder, DraftChain | None]
"""A branch's draft and a chain of it after which the next token is asked for."""
