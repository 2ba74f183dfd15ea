"""Sequences: tokens on their way through a model, where their keys and values lie, and the round
and the steps that they are decoded for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.embedded.cache_node import EMPTY, CacheNode
from runtime.embedded.draft_tree import DraftBranch, DraftTree
from runtime.embedded.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Branch, KvMoved, Sampling, Step
from search.tree import Finish

Order = tuple[int, int, int]

SampledToken = tuple[int, float, float]
"""A token with its log-probability and the entropy before it."""


class TokenSequence:
    """A token sequence that is computed by one model; what it is computed for, subclasses say.

    ``order`` says who goes first and who gives way; ``size`` is the most tokens it may come to; a
    ``spare`` one runs in idle places and gives way to all others. It is ``live`` while it has KV of
    its own or reads the cache's, from ``begin`` until it is published or dropped.

    While it is live its first ``shared`` tokens are the radix tree's (locked), the rest is its own.
    ``tokens`` and ``slots`` are int64 buffers of the final length; ``length`` tokens are known,
    ``computed`` of them have keys and values, ``allocated`` have slots. The last ``proposed`` known
    tokens are guesses that a pass is to check, ``forks`` others beside them. Its private tokens are
    those from ``shared`` to ``allocated``.
    """

    anchor: CacheNode

    def __init__(self, tree: str, order: Order, size: int, *, spare: bool = False) -> None:
        self.tree = tree
        self.order = order
        self.size = size
        self.spare = spare
        self.live = False
        self.tokens = self.slots = EMPTY
        self.length = self.proposed = 0
        self.opened = self.shared = self.computed = self.allocated = 0
        self.forks: list[DraftBranch] = []

    def begin(self, tokens: np.ndarray, anchor: CacheNode, cached: np.ndarray) -> None:
        """It starts from ``tokens``; ``cached``: slots of the first of them, down to ``anchor``."""
        self.tokens = np.zeros(self.size, dtype=np.int64)
        self.tokens[: len(tokens)] = tokens
        self.slots = np.full(self.size, -1, dtype=np.int64)
        self.slots[: len(cached)] = cached
        self.anchor, self.live = anchor, True
        self.length, self.proposed, self.forks = len(tokens), 0, []
        self.opened = self.shared = self.computed = self.allocated = len(cached)

    @property
    def missing(self) -> int:
        """Known tokens whose keys and values are still to be computed."""
        return self.length - self.computed

    @property
    def private(self) -> np.ndarray:
        """The slots nobody else reads."""
        return self.slots[self.shared : self.allocated]

    def append(self, token: int) -> None:
        """Add a token just drawn."""
        self.tokens[self.length] = token
        self.length += 1

    @property
    def known(self) -> int:
        """Tokens that are no guesses."""
        return self.length - self.proposed

    def guess(self, token: int) -> None:
        """Add a token that may turn out wrong."""
        self.append(token)
        self.proposed += 1

    def propose(self, guesses: DraftTree) -> None:
        """Add guesses, to be taken back by ``retract`` after the pass that checks them."""
        for token in guesses.tokens:
            self.guess(token)
        self.forks = guesses.forks

    def retract(self) -> DraftTree:
        """Take the guesses back, and what was computed of them. The forks' slots go with them."""
        known = self.known
        guesses = DraftTree(self.tokens[known : self.length].tolist(), self.forks)
        self.length, self.proposed, self.forks = known, 0, []
        self.computed = min(self.computed, known)
        return guesses

    def confirm(self, token: int, fork: DraftBranch | None, depth: int) -> None:
        """Add a token just drawn that equals the guess after ``depth`` others along a way. Its keys
        and values are still there: in the sequence's own slot, or in the fork's, which is
        exchanged."""
        if fork is not None:
            here, there = self.length, depth - fork.at
            self.slots[here], fork.slots[there] = fork.slots[there], self.slots[here]
        self.append(token)
        self.computed += 1

    def depths(self) -> list[int]:
        """How many guesses stand before the draw of each row, in the rows' order."""
        beside = (fork.at + i for fork in self.forks for i in range(1, len(fork.tokens) + 1))
        return [*range(1 + self.proposed), *beside]

    def way(self, fork: DraftBranch | None, guesses: int) -> np.ndarray:
        """The slots of the known tokens and of the first ``guesses`` guesses along a way."""
        if fork is None:
            return self.slots[: self.known + guesses]
        above = self.way(fork.above, fork.at)
        return np.concatenate([above, fork.slots[: guesses - fork.at]])


@dataclass(slots=True, eq=False)
class ExpandCall:
    """A round asked for at once, and the steps drawn so far. ``parted``: some of its branches
    decoded the same and then diverged. ``longest``: tokens of its longest step so far, ``left``:
    what was left to decode of that which had most left when the round began."""

    id: int
    number: int
    tree: str
    sampling: Sampling
    stops: StopStrings
    steps: list[Step | None]
    parted: bool = False
    longest: int = 0
    left: int = 0

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
    """A branch and what was decoded of it. ``logprob`` is the sum over the ``drawn`` tokens;
    ``spare``: no round has asked for it yet; ``taken``: tokens decoded before one did;
    ``following``: branches that have decoded the same and go along with this one.
    """

    def __init__(
        self,
        call: ExpandCall,
        index: int,
        branch: Branch,
        prefix: SharedPrefix,
        order: Order,
        *,
        spare: bool = False,
    ) -> None:
        """``index``: of the branch in its call."""
        super().__init__(call.tree, order, len(prefix.tokens) + branch.limit, spare=spare)
        self.call = call
        self.index = index
        self.branch = branch
        self.prefix = prefix
        self.drawn: list[int] = []
        self.logprob = self.entropy = 0.0
        self.taken = 0
        self.following: list[BranchSequence] = []

    @property
    def position(self) -> int:
        """Tokens of the prefix and of what was decoded."""
        return len(self.prefix.tokens) + len(self.drawn)

    @property
    def left(self) -> int:
        """The most tokens still to be decoded."""
        return self.branch.limit - len(self.drawn)

    def decoded(self, sampled: SampledToken) -> int:
        """Add a token to the step; its id."""
        token, logprob, self.entropy = sampled
        self.drawn.append(token)
        self.logprob += logprob
        return token

    def path(self) -> np.ndarray:
        """The prefix and what was decoded, int64."""
        return np.concatenate([self.prefix.tokens, np.asarray(self.drawn, dtype=np.int64)])


class StepBuilder:
    """Judges the tokens that branches have decoded, and remembers how likely each step was."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._stops = StopStringTables(text.pieces)
        self._likelihoods: dict[str, dict[bytes, tuple[float, int]]] = {}
        """By tree and token path (int64): a step's mean log-probability, and its tokens."""

    def stops(self, sampling: Sampling) -> StopStrings:
        """What ends a step under this sampling. Raises ValueError for strings that are no text."""
        return self._stops.of(sampling.stop)

    def finish(self, run: BranchSequence) -> Finish | None:
        """Why the step ends with its last token; None if it goes on."""
        if run.drawn[-1] in self._text.eos:
            return Finish.END
        if run.call.stops.ended(run.drawn):
            return Finish.STEP
        return Finish.LENGTH if len(run.drawn) == run.branch.limit else None

    def step(self, run: BranchSequence, finish: Finish, attention: tuple[float, ...] = ()) -> Step:
        """The step that a branch has come to, with what its end attends to."""
        count = len(run.drawn)
        mean = run.logprob / count
        self._likelihoods.setdefault(run.tree, {})[run.path().tobytes()] = mean, count
        text = self._text.decode(run.drawn, run.branch.tokens, last=finish is Finish.END)
        return Step(tuple(run.drawn), text, finish, mean, run.entropy, attention)

    def mean_logprob(self, tree: str, prompt: np.ndarray, steps: Sequence[Sequence[int]]) -> float:
        """Mean log-probability a token of steps decoded here. Raises KeyError for others."""
        likelihoods, path = self._likelihoods[tree], prompt
        total, tokens = 0.0, 0
        for step in steps:
            path = np.concatenate([path, np.asarray(step, dtype=np.int64)])
            mean, count = likelihoods[path.tobytes()]
            total, tokens = total + mean * count, tokens + count
        return total / tokens

    def forget(self, tree: str) -> None:
        """The search is over."""
        self._likelihoods.pop(tree, None)
