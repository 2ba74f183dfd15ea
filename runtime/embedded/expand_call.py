"""A round of branches on its way through the policy model."""

from __future__ import annotations

from dataclasses import dataclass

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

    def path(self) -> np.ndarray:
        """The prefix and what was decoded, int64."""
        return np.concatenate([self.prefix.tokens, np.asarray(self.drawn, dtype=np.int64)])
