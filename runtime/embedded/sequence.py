"""Sequences: tokens that a model computes, and the slots of their keys and values; the draft tokens
that a pass verifies with them; the rounds and steps that they are decoded for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.embedded.cache_node import EMPTY, CacheNode
from runtime.embedded.grammar_masks import GrammarMasks
from runtime.embedded.logits_processors import LogitsProcessors
from runtime.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Branch, KvMoved, Sampling, Step, TokenLogprob
from search.tree import Finish

Order = tuple[int, int, int]

TopLogprobs = tuple[tuple[int, float], ...]
SampledToken = tuple[int, float, float] | tuple[int, float, float, TopLogprobs]
"""A token, its log-probability, the entropy of its distribution, and, if the sampling asks for
them, the likeliest tokens."""


@dataclass(slots=True, eq=False)
class DraftChain:
    """Draft tokens that may come after the first ``at`` draft tokens along ``parent`` (None: the
    main chain).

    During a pass, its first ``computed`` tokens have keys and values in ``slots``.
    """

    parent: DraftChain | None
    at: int
    tokens: list[int]
    computed: int = 0
    slots: np.ndarray = field(default_factory=lambda: EMPTY)

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def depth(self) -> int:
        """Draft tokens from the root of the tree to the chain's end."""
        return self.at + len(self.tokens)


@dataclass(slots=True, eq=False)
class DraftTree:
    """``tokens``: the main chain; ``children``: the other chains, each after its parent.

    The rows of the pass that verifies the tree are in this order: the last committed token, the
    main chain, the children.
    """

    tokens: list[int] = field(default_factory=list)
    children: list[DraftChain] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Draft tokens in all."""
        return len(self.tokens) + sum(len(child.tokens) for child in self.children)

    def at(self, chain: DraftChain | None, depth: int) -> Iterator[tuple[int, DraftChain | None]]:
        """The tokens proposed after ``depth`` draft tokens along a chain, the likeliest first, each
        with its chain."""
        tokens, start = (self.tokens, 0) if chain is None else (chain.tokens, chain.at)
        if depth - start < len(tokens):
            yield tokens[depth - start], chain
        for child in self.children:
            if child.parent is chain and child.at == depth:
                yield child.tokens[0], child

    def row(self, chain: DraftChain | None, depth: int) -> int:
        """The pass's row of the ``depth``-th draft token along a chain; 0: the committed token."""
        if chain is None:
            return depth
        before = self.children[: self.children.index(chain)]
        return sum(len(child.tokens) for child in before) + len(self.tokens) + depth - chain.at


class TokenSequence:
    """A sequence of tokens that one model computes. Subclasses say what it is computed for.

    ``order``: the lowest goes first and is preempted last; ``size``: the most tokens it may have;
    a ``preemptible`` one runs in idle places and makes room for all others. It is ``live`` from
    ``begin`` until it is published or dropped, while it has KV of its own or reads the cache's.

    While it is live, its first ``shared`` tokens are the radix tree's (locked), the rest its own.
    ``tokens`` and ``slots`` are int64 buffers of ``size`` entries; of its ``length`` tokens
    ``computed`` have keys and values, ``allocated`` have slots, and ``cached_at_start`` were cached
    when it began. The last ``draft_count`` tokens are the main chain of the draft that the next
    pass verifies, and ``children`` are its other chains. The private tokens are those from
    ``shared`` to ``allocated``.
    """

    anchor: CacheNode

    def __init__(self, tree: str, order: Order, size: int, *, preemptible: bool = False) -> None:
        self.tree = tree
        self.order = order
        self.size = size
        self.preemptible = preemptible
        self.live = False
        self.tokens = self.slots = EMPTY
        self.length = self.draft_count = 0
        self.cached_at_start = self.shared = self.computed = self.allocated = 0
        self.children: list[DraftChain] = []

    def begin(self, tokens: np.ndarray, anchor: CacheNode, cached: np.ndarray) -> None:
        """Start from ``tokens``; ``cached``: the slots of their prefix that ends at ``anchor``."""
        self.tokens = np.zeros(self.size, dtype=np.int64)
        self.tokens[: len(tokens)] = tokens
        self.slots = np.full(self.size, -1, dtype=np.int64)
        self.slots[: len(cached)] = cached
        self.anchor, self.live = anchor, True
        self.length, self.draft_count, self.children = len(tokens), 0, []
        self.cached_at_start = self.shared = self.computed = self.allocated = len(cached)

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.length - self.computed

    @property
    def committed(self) -> int:
        """Tokens without the draft tokens."""
        return self.length - self.draft_count

    @property
    def private(self) -> np.ndarray:
        """The slots that only this sequence reads."""
        return self.slots[self.shared : self.allocated]

    def append(self, token: int) -> None:
        """Add a token."""
        self.tokens[self.length] = token
        self.length += 1

    def append_draft(self, token: int) -> None:
        """Add a draft token."""
        self.append(token)
        self.draft_count += 1

    def attach_draft(self, draft: DraftTree) -> None:
        """Add a draft, which ``detach_draft`` removes after the pass that verifies it."""
        for token in draft.tokens:
            self.append_draft(token)
        self.children = draft.children

    def detach_draft(self) -> DraftTree:
        """Remove and return the draft: its main chain is no longer computed, its children keep
        their slots."""
        committed = self.committed
        draft = DraftTree(self.tokens[committed : self.length].tolist(), self.children)
        self.length, self.draft_count, self.children = committed, 0, []
        self.computed = min(self.computed, committed)
        return draft

    def accept(self, token: int, chain: DraftChain | None, depth: int) -> None:
        """Add a sampled token that equals the draft token after ``depth`` others along a chain. Its
        keys and values are computed already: in the sequence's own slot, or in the chain's slot,
        which is swapped in."""
        if chain is not None:
            i, j = self.length, depth - chain.at
            self.slots[i], chain.slots[j] = chain.slots[j], self.slots[i]
        self.append(token)
        self.computed += 1

    def drafted_before(self) -> list[list[int]]:
        """The draft tokens before each row's sample, in row order."""
        before = [self._drafted_along(None, depth) for depth in range(1 + self.draft_count)]
        for child in self.children:
            depths = range(child.at + 1, child.depth + 1)
            before += [self._drafted_along(child, depth) for depth in depths]
        return before

    def _drafted_along(self, chain: DraftChain | None, depth: int) -> list[int]:
        """The first ``depth`` draft tokens on a chain."""
        if chain is None:
            return self.tokens[self.committed : self.committed + depth].tolist()
        above = self._drafted_along(chain.parent, chain.at)
        return above + chain.tokens[: depth - chain.at]

    def slots_along(self, chain: DraftChain | None, depth: int) -> np.ndarray:
        """The slots of the committed tokens and of the first ``depth`` draft tokens on a chain."""
        if chain is None:
            return self.slots[: self.committed + depth]
        above = self.slots_along(chain.parent, chain.at)
        return np.concatenate([above, chain.slots[: depth - chain.at]])


def order_of(sequence: TokenSequence) -> Order:
    """A sort key: sequences that go first come first."""
    return sequence.order


@dataclass(slots=True, eq=False)
class ExpandCall:
    """A round, and its steps decoded so far. ``processors``: how its sampling changes logits, None
    if not at all. ``diverged``: some of its branches decoded the same and then diverged.
    ``longest``: tokens of its longest finished step; ``longest_remaining``: the most tokens of such
    a step that were not decoded before the round began."""

    id: int
    number: int
    tree: str
    sampling: Sampling
    stops: StopStrings
    steps: list[Step | None]
    processors: LogitsProcessors | None = None
    diverged: bool = False
    longest: int = 0
    longest_remaining: int = 0

    @property
    def complete(self) -> bool:
        """Whether every branch has its step."""
        return None not in self.steps


@dataclass(frozen=True, slots=True)
class ExpandResult:
    """A finished call, and what happened to its search's KV since the last one."""

    call: int
    steps: list[Step]
    tree: str
    moved: KvMoved


class SharedPrefix(TokenSequence):
    """A distinct prefix of a call, prefilled once for all branches that start from it.

    ``visited``: the search decoded this prefix, so all but the last token once had KV. ``logits``
    (1, vocab): those of its last token; ``used``: a branch has started from them.
    """

    def __init__(self, tree: str, tokens: np.ndarray, *, visited: bool) -> None:
        super().__init__(tree, (0, 0, 0), len(tokens))
        self.tokens = tokens
        self.visited = visited
        self.logits: torch.Tensor | None = None
        self.used = False


class BranchSequence(TokenSequence):
    """A branch and its ``output`` tokens decoded so far; ``logprob``: their sum. ``preemptible``:
    no round has asked for it yet; ``extended``: tokens that beam extension had decoded when a round
    asked for it; ``followers``: branches that have decoded the same and share its slots.
    """

    def __init__(
        self,
        call: ExpandCall,
        index: int,
        branch: Branch,
        prefix: SharedPrefix,
        order: Order,
        *,
        preemptible: bool = False,
    ) -> None:
        """``index``: the branch's index in its call."""
        super().__init__(
            call.tree, order, len(prefix.tokens) + branch.limit, preemptible=preemptible
        )
        self.call = call
        self.index = index
        self.branch = branch
        self.prefix = prefix
        self.output: list[int] = []
        self.logprob = self.entropy = 0.0
        self.logprobs: list[TokenLogprob] = []
        self.extended = 0
        self.followers: list[BranchSequence] = []

    @property
    def position(self) -> int:
        """Tokens of the prefix and the output: the position of the next token."""
        return len(self.prefix.tokens) + len(self.output)

    @property
    def remaining(self) -> int:
        """The most tokens that may still be decoded."""
        return self.branch.limit - len(self.output)

    def decode(self, sampled: SampledToken) -> int:
        """Add a sampled token to the step; returns its id."""
        token, logprob, self.entropy = sampled[:3]
        self.output.append(token)
        self.logprob += logprob
        if len(sampled) == 4:
            self.logprobs.append(TokenLogprob(logprob, sampled[3]))
        return token

    def path(self, drafted: Sequence[int] = ()) -> np.ndarray:
        """The token ids of the prefix, the output and then ``drafted``, int64."""
        output = np.asarray([*self.output, *drafted], dtype=np.int64)
        return np.concatenate([self.prefix.tokens, output])


class StepBuilder:
    """Decides where steps end, builds finished steps, and remembers how likely each one was."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._stops = StopStringTables(text.pieces)
        self._grammars = GrammarMasks(text)
        self._likelihoods: dict[str, dict[bytes, tuple[float, int]]] = {}
        """By tree and token path (int64 bytes): a step's mean log-probability and token count."""

    def call(
        self, call_id: int, number: int, tree: str, sampling: Sampling, branches: int
    ) -> ExpandCall:
        """A round of ``branches`` steps, with its stop strings and logits processors. Raises
        ValueError for stop strings that are not valid text, EngineError for a grammar that cannot
        be compiled."""
        stops, processors = self._stops.of(sampling.stop), None
        grammar = None if sampling.grammar is None else self._grammars.of(sampling.grammar)
        if sampling.logits.active() or grammar is not None:
            processors = LogitsProcessors(sampling, self._text.eos, grammar)
        steps: list[Step | None] = [None] * branches
        return ExpandCall(call_id, number, tree, sampling, stops, steps, processors)

    def finish(self, seq: BranchSequence) -> Finish | None:
        """Why the step ends with its last token; None if it goes on. Raises EngineError for a reply
        that ends without fitting its grammar."""
        if seq.output[-1] in self._text.eos:
            if seq.call.processors is not None:
                seq.call.processors.may_end(seq.path()[:-1], seq.branch.seed)
            return Finish.END
        if seq.call.stops.matches(seq.output):
            return Finish.STEP
        return Finish.LENGTH if len(seq.output) == seq.branch.limit else None

    def step(self, seq: BranchSequence, finish: Finish, attention: tuple[float, ...] = ()) -> Step:
        """A branch's finished step; ``attention``: what its last token attends to."""
        count = len(seq.output)
        mean = seq.logprob / count
        self._likelihoods.setdefault(seq.tree, {})[seq.path().tobytes()] = mean, count
        text = self._text.decode(seq.output, seq.branch.tokens, last=finish is Finish.END)
        details = attention, tuple(seq.logprobs)
        return Step(tuple(seq.output), text, finish, mean, seq.entropy, *details)

    def mean_logprob(
        self, tree: str, prompt: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> float:
        """Mean log-probability per token of steps decoded here. Raises KeyError for others."""
        likelihoods, path = self._likelihoods[tree], np.asarray(prompt, dtype=np.int64)
        total, tokens = 0.0, 0
        for step in steps:
            path = np.concatenate([path, np.asarray(step, dtype=np.int64)])
            mean, count = likelihoods[path.tobytes()]
            total, tokens = total + mean * count, tokens + count
        return total / tokens

    def forget(self, tree: str) -> None:
        """Forget a search's steps."""
        self._likelihoods.pop(tree, None)
