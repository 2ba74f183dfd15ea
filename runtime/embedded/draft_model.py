"""The draft model: proposes how branches may go on, with its own KV cache.

It proposes what it would sample itself under the noise that the branch will be sampled with. Its
proposals change time only; no answer depends on them.
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
    """The draft model with its cache, in which each branch that is drafted for has a sequence."""

    noise = 0
    """XORed with a branch's seed, it gives the seed of its draft tokens' noise; 0: the branch's."""

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
        drafts. ``pass_time``: receives the time of each pass, by ``clock``."""
        self.cache = PrefixCache(options.draft_kv_tokens)
        self._batch = Batch(forward, self.cache, limit=2 * options.batch_limit)
        self._longest = min(config.context, options.draft_kv_tokens)
        self._eos = eos
        self._flops = config.flops
        self._flops_by_tree: defaultdict[str, float] = defaultdict(float)
        self._pass_time = pass_time
        self._clock = clock
        self._last_clock = 0.0
        self._sequences: dict[BranchSequence, TokenSequence] = {}
        self._prefixes: set[TokenSequence] = set()

    def propose(
        self, widths: Mapping[BranchSequence, Sequence[int]]
    ) -> dict[BranchSequence, DraftTree]:
        """A draft for each branch. ``widths``: how many tokens to draft at each depth (at least one
        depth) after each draft token before it. Tokens that end a step are not drafted."""
        self._last_clock = self._clock()
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
        """The candidates for the next draft token after each tip, the likeliest first, from the
        tip's row of ``logits`` (tips, vocab)."""
        seqs = [builder.seq for builder, _ in tips]
        ranked = rank_candidates(
            logits,
            np.array([seq.branch.seed ^ self.noise for seq in seqs], dtype=np.uint64),
            np.array([builder.position(chain) for builder, chain in tips], dtype=np.int64),
            np.array([seq.call.sampling.temperature for seq in seqs]),
            np.array([seq.call.sampling.top_p for seq in seqs]),
            max(builder.width(chain) for builder, chain in tips),
        ).tolist()
        for index, (builder, chain) in enumerate(tips):
            seq, processors = builder.seq, builder.seq.call.processors
            if processors is not None:
                path, seed = builder.path(chain), seq.branch.seed ^ self.noise
                row, count = logits[index].numpy(), builder.width(chain)
                ranked[index] = processors.rank(path, seed, row, count)
        return ranked

    def diverge(self, seq: BranchSequence) -> None:
        """Put what was computed of a branch into the cache, because others go on from there."""
        sequence = self._sequences.get(seq)
        if sequence is not None:
            self._catch_up(seq)
            sequence.length = sequence.computed  # no pass is to compute more before the next draft
            self.cache.share(sequence)

    def end(self, seq: BranchSequence, *, publish: bool) -> None:
        """End the sequence of an ended or preempted branch; ``publish``: cache what it computed."""
        if seq not in self._sequences:
            return
        if publish:
            self._catch_up(seq)
        (self._batch.publish if publish else self._batch.drop)(self._sequences.pop(seq))

    def release(self, tree: str, prompt: np.ndarray | None) -> float:
        """Release a search that has no branches; returns what drafting for it cost, in FLOPs."""
        self.cache.release(tree, prompt)
        return self._flops_by_tree.pop(tree, 0.0)

    def _catch_up(self, seq: BranchSequence) -> None:
        """Give a branch's sequence the branch's tokens; the last one is still to be computed."""
        sequence = self._sequences.get(seq)
        if sequence is None:
            return
        tokens = seq.path()
        shared = common_prefix(sequence.tokens[: sequence.computed], tokens)
        sequence.tokens[: len(tokens)] = tokens
        sequence.length = len(tokens)
        sequence.computed = min(shared, sequence.length - 1)

    def _enter(self, seqs: Sequence[BranchSequence]) -> None:
        """Start sequences for branches that have none, computing each distinct prefix once."""
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
        """Start a sequence for a branch's prefix; False while it has to wait."""
        prefix = seq.prefix.tokens
        sequence = TokenSequence(seq.tree, seq.order, len(prefix))
        if self._batch.enter(sequence, prefix, len(prefix)) is not None:
            return False
        self._prefixes.add(sequence)
        return True

    def _grow(self, pairs: Sequence[tuple[DraftTreeBuilder, Advance]]) -> None:
        """Extend each draft by what the draft model proposes after this pass."""
        tips: list[DraftTip] = []
        rows: list[torch.Tensor] = []
        for builder, advance in pairs:
            if advance.logits is not None:
                tips.append((builder, None))
                rows.append(advance.logits[-1:])
            tips += [(builder, child) for child, _ in advance.children]
            rows += [logits[-1:] for _, logits in advance.children]
        ranked = self.rank(tips, torch.cat(rows)) if tips else []
        for (builder, chain), tokens in zip(tips, ranked, strict=True):
            builder.extend(chain, tokens)

    def _note(self, advances: Sequence[Advance]) -> None:
        """Record the seconds since the last pass, and charge the pass to its searches."""
        for advance in advances:
            self._flops_by_tree[advance.sequence.tree] += advance.flops(self._flops)
        before, self._last_clock = self._last_clock, self._clock()
        rows = sum(advance.all_rows for advance in advances)
        self._pass_time.add(rows, self._last_clock - before)

    def _pass(self, skip: Set[TokenSequence] = frozenset()) -> list[Advance]:
        """Run a pass over all sequences but those in ``skip``; preempted ones get no draft."""
        for sequence in self._batch.schedule(skip):
            assert sequence is not None, "the draft's cache may evict everything"
            self._prefixes.discard(sequence)
            for seq in [seq for seq, running in self._sequences.items() if running is sequence]:
                del self._sequences[seq]
        return self._batch.run()


class DraftTreeBuilder:
    """Builds the draft of one branch; all its chains grow equally deep until they end."""

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
        """Lengthen the chain by the likeliest token of ``ranked`` and begin children with the next
        ones, up to the width. Tokens that would end the step are left out: they need no row."""
        depth = self.depth(chain)
        prefix = [*self.seq.output, *self._tokens(chain)]
        candidates = [token for token in ranked[: self._widths[depth]] if token >= 0]
        continuing = [token for token in candidates if not self._ends([*prefix, token])]
        deepest = depth + 1 == len(self._widths)
        for rank, token in enumerate(continuing):
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
        """The finished draft; what was computed of its main chain stays in the sequence. Children
        are cut to the depth of the main chain, so that they fit its positions."""
        sequence = self._sequence
        tokens, children = self._tokens(None), sequence.children
        cache.free_children(children)
        sequence.children, sequence.draft_count = [], 0
        for chain, token in self._last.items():
            (tokens if chain is None else chain.tokens).append(token)
        fitting: list[DraftChain] = []
        for child in [*children, *self._leaves]:
            child.tokens = child.tokens[: max(0, len(tokens) - child.at)]
            if child.tokens and (child.parent is None or child.parent in fitting):
                fitting.append(child)
        return DraftTree(tokens, fitting)

    def _tokens(self, chain: DraftChain | None) -> list[int]:
        """All draft tokens on a chain."""
        if chain is None:
            return self._sequence.tokens[self._sequence.committed : self._sequence.length].tolist()
        return [*self._tokens(chain.parent)[: chain.at], *chain.tokens]

    def _ends(self, tokens: Sequence[int]) -> bool:
        """Whether a step would end with the last of these tokens."""
        return tokens[-1] in self._eos or self.seq.call.stops.matches(tokens)


DraftTip = tuple[DraftTreeBuilder, DraftChain | None]
"""A branch's draft, and one of its chains that is to get its next token."""
