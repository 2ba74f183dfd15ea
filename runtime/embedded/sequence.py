"""Sequences: tokens on their way through a model, and where their keys and values lie; the draft
tokens that a pass verifies with them; the rounds and steps that they are decoded for.
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
"""A token with its log-probability and the entropy before it, and the likeliest ones there where
the sampling asks for them."""


@dataclass(slots=True, eq=False)
class DraftChain:
    """Tokens that may come after the first ``at`` draft tokens along ``parent`` (None: the main
    chain).

    While a pass needs them, its first ``computed`` tokens have keys and values in ``slots``.
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
        """Draft tokens from the root of the tree to its end."""
        return self.at + len(self.tokens)


@dataclass(slots=True, eq=False)
class DraftTree:
    """``tokens``: the main chain; ``children``: others, each after the one it leaves.

    The rows of a pass that verifies them stand in this order: the last committed token, the main
    chain, the children.
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
        """The row of the pass that stands after ``depth`` draft tokens along a chain."""
        if chain is None:
            return depth
        before = self.children[: self.children.index(chain)]
        return sum(len(child.tokens) for child in before) + len(self.tokens) + depth - chain.at


class TokenSequence:
    """A token sequence that is computed by one model; what it is computed for, subclasses say.

    ``order`` says who goes first and who is preempted last; ``size`` is the most tokens it may
    come to; a ``preemptible`` one runs in idle places and makes room for all others. It is
    ``live`` from ``begin`` until it is published or dropped, while it has KV of its own or reads
    the cache's.

    While it is live its first ``shared`` tokens are the radix tree's (locked), the rest is its own.
    ``tokens`` and ``slots`` are int64 buffers of the final length; of ``length`` tokens
    ``computed`` have keys and values, ``allocated`` have slots. The last ``draft_count`` of them
    are the main chain of a draft that a pass is to verify, ``children`` the draft's others. Its
    private tokens are those from ``shared`` to ``allocated``.
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
        self.opened = self.shared = self.computed = self.allocated = 0
        self.children: list[DraftChain] = []

    def begin(self, tokens: np.ndarray, anchor: CacheNode, cached: np.ndarray) -> None:
        """It starts from ``tokens``; ``cached``: slots of the first of them, down to ``anchor``."""
        self.tokens = np.zeros(self.size, dtype=np.int64)
        self.tokens[: len(tokens)] = tokens
        self.slots = np.full(self.size, -1, dtype=np.int64)
        self.slots[: len(cached)] = cached
        self.anchor, self.live = anchor, True
        self.length, self.draft_count, self.children = len(tokens), 0, []
        self.opened = self.shared = self.computed = self.allocated = len(cached)

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.length - self.computed

    @property
    def committed(self) -> int:
        """Tokens that are no draft tokens."""
        return self.length - self.draft_count

    @property
    def private(self) -> np.ndarray:
        """The slots nobody else reads."""
        return self.slots[self.shared : self.allocated]

    def append(self, token: int) -> None:
        """Add a token."""
        self.tokens[self.length] = token
        self.length += 1

    def append_draft(self, token: int) -> None:
        """Add a token that may turn out wrong."""
        self.append(token)
        self.draft_count += 1

    def attach_draft(self, draft: DraftTree) -> None:
        """Add draft tokens, to be taken back by ``detach_draft`` after the pass that verifies
        them."""
        for token in draft.tokens:
            self.append_draft(token)
        self.children = draft.children

    def detach_draft(self) -> DraftTree:
        """Take the draft tokens back, and what was computed of them. Its children's slots go with
        them."""
        committed = self.committed
        draft = DraftTree(self.tokens[committed : self.length].tolist(), self.children)
        self.length, self.draft_count, self.children = committed, 0, []
        self.computed = min(self.computed, committed)
        return draft

    def accept(self, token: int, chain: DraftChain | None, depth: int) -> None:
        """Add a sampled token that equals the draft token after ``depth`` others along a chain. Its
        keys and values are still there: in the sequence's own slot, or in the chain's, which is
        exchanged."""
        if chain is not None:
            here, there = self.length, depth - chain.at
            self.slots[here], chain.slots[there] = chain.slots[there], self.slots[here]
        self.append(token)
        self.computed += 1

    def drafted_before(self) -> list[list[int]]:
        """The draft tokens that stand before the sample of each row, in the rows' order."""
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
    """Who goes first: least first."""
    return sequence.order


@dataclass(slots=True, eq=False)
class ExpandCall:
    """A round asked for at once, and the steps decoded so far. ``processors``: what its sampling
    makes of logits, None where that is nothing. ``diverged``: some of its branches decoded the same
    and then diverged. ``longest``: tokens of its longest step so far, ``longest_left``: the most
    that a step had left when the round began."""

    id: int
    number: int
    tree: str
    sampling: Sampling
    stops: StopStrings
    steps: list[Step | None]
    processors: LogitsProcessors | None = None
    diverged: bool = False
    longest: int = 0
    longest_left: int = 0

    @property
    def done(self) -> bool:
        """Whether every branch has its step."""
        return None not in self.steps


@dataclass(frozen=True, slots=True)
class ExpandResult:
    """A finished call, and what the KV of its search went through since the last one."""

    call: int
    steps: list[Step]
    tree: str
    moved: KvMoved


class SharedPrefix(TokenSequence):
    """A distinct prefix of a call, prefilled once for all branches that start from it.

    ``visited``: the search has been here before, so all but the last token once had KV. ``logits``
    (1, vocab) are those of its last token; ``used``: a branch has started from them.
    """

    def __init__(self, tree: str, tokens: np.ndarray, *, visited: bool) -> None:
        super().__init__(tree, (0, 0, 0), len(tokens))
        self.tokens = tokens
        self.visited = visited
        self.logits: torch.Tensor | None = None
        self.used = False


class BranchSequence(TokenSequence):
    """A branch and what was decoded of it. ``logprob`` is the sum over the ``output`` tokens;
    ``preemptible``: no round has asked for it yet; ``extended``: tokens that beam extension had
    decoded when one did; ``followers``: branches that have decoded the same and share its slots.
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
        """``index``: of the branch in its call."""
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
        """Tokens of the prefix and of what was decoded."""
        return len(self.prefix.tokens) + len(self.output)

    @property
    def left(self) -> int:
        """The most tokens still to be decoded."""
        return self.branch.limit - len(self.output)

    def decode(self, sampled: SampledToken) -> int:
        """Add a token to the step; its id."""
        token, logprob, self.entropy = sampled[:3]
        self.output.append(token)
        self.logprob += logprob
        if len(sampled) == 4:
            self.logprobs.append(TokenLogprob(logprob, sampled[3]))
        return token

    def path(self, drafted: Sequence[int] = ()) -> np.ndarray:
        """The prefix, what was decoded and what is ``drafted`` after that, int64."""
        output = np.asarray([*self.output, *drafted], dtype=np.int64)
        return np.concatenate([self.prefix.tokens, output])


class StepBuilder:
    """Judges the tokens that branches have decoded, and remembers how likely each step was."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._stops = StopStringTables(text.pieces)
        self._grammars = GrammarMasks(text)
        self._likelihoods: dict[str, dict[bytes, tuple[float, int]]] = {}
        """By tree and token path (int64): a step's mean log-probability, and its tokens."""

    def call(
        self, call_id: int, number: int, tree: str, sampling: Sampling, branches: int
    ) -> ExpandCall:
        """A round of so many steps, with what ends them and what its sampling makes of logits.
        Raises ValueError for stop strings that are no text, EngineError for a grammar that cannot
        be compiled."""
        stops, processors = self._stops.of(sampling.stop), None
        grammar = None if sampling.grammar is None else self._grammars.of(sampling.grammar)
        if sampling.logits.asked() or grammar is not None:
            processors = LogitsProcessors(sampling, self._text.eos, grammar)
        steps: list[Step | None] = [None] * branches
        return ExpandCall(call_id, number, tree, sampling, stops, steps, processors)

    def finish(self, seq: BranchSequence) -> Finish | None:
        """Why the step ends with its last token; None if it goes on. Raises EngineError for a reply
        that nothing could go on with and that does not fit its grammar."""
        if seq.output[-1] in self._text.eos:
            if seq.call.processors is not None:
                seq.call.processors.may_end(seq.path()[:-1], seq.branch.seed)
            return Finish.END
        if seq.call.stops.ended(seq.output):
            return Finish.STEP
        return Finish.LENGTH if len(seq.output) == seq.branch.limit else None

    def step(self, seq: BranchSequence, finish: Finish, attention: tuple[float, ...] = ()) -> Step:
        """The step that a branch has come to, with what its end attends to."""
        count = len(seq.output)
        mean = seq.logprob / count
        self._likelihoods.setdefault(seq.tree, {})[seq.path().tobytes()] = mean, count
        text = self._text.decode(seq.output, seq.branch.tokens, last=finish is Finish.END)
        more = attention, tuple(seq.logprobs)
        return Step(tuple(seq.output), text, finish, mean, seq.entropy, *more)

    def mean_logprob(
        self, tree: str, prompt: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> float:
        """Mean log-probability a token of steps decoded here. Raises KeyError for others."""
        likelihoods, path = self._likelihoods[tree], np.asarray(prompt, dtype=np.int64)
        total, tokens = 0.0, 0
        for step in steps:
            path = np.concatenate([path, np.asarray(step, dtype=np.int64)])
            mean, count = likelihoods[path.tobytes()]
            total, tokens = total + mean * count, tokens + count
        return total / tokens

    def forget(self, tree: str) -> None:
        """The search is over."""
        self._likelihoods.pop(tree, None)
