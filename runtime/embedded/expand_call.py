"""A round of branches on its way through the policy model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.embedded.sequence import Order, TokenSequence
from runtime.embedded.stop_strings import StopStrings
from search.engine import Branch, KvMoved, Sampling, Step


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


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """A distinct prefix of a call, prefilled once for all branches that start from it.

    ``known``: the search has been here before, so all but the last token once had KV. ``logits``
    (1, vocab) are those of its last token; ``used``: a branch has started from them.
    """

    tokens: np.ndarray
    known: bool
    lane: TokenSequence | None = None
    logits: torch.Tensor | None = None
    used: bool = False


@dataclass(slots=True, eq=False)
class BranchSequence:
    """A branch and what it has drawn. ``logprob`` is the sum over the drawn tokens; ``early``: no
    round has asked for it yet; ``taken``: tokens drawn before one did; ``following``: branches that
    have drawn the same and use its lane.
    """

    call: ExpandCall
    index: int
    branch: Branch
    prefix: SharedPrefix
    order: Order
    lane: TokenSequence | None = None
    drawn: list[int] = field(default_factory=list)
    logprob: float = 0.0
    entropy: float = 0.0
    early: bool = False
    taken: int = 0
    following: list[BranchSequence] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the prefix and of what was drawn."""
        return len(self.prefix.tokens) + len(self.drawn)

    @property
    def size(self) -> int:
        """The most tokens it may come to."""
        return len(self.prefix.tokens) + self.branch.limit

    @property
    def left(self) -> int:
        """The most tokens still to be drawn."""
        return self.branch.limit - len(self.drawn)

    def tokens(self) -> np.ndarray:
        """The prefix and what was drawn, int64."""
        return np.concatenate([self.prefix.tokens, np.asarray(self.drawn, dtype=np.int64)])
