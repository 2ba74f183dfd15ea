"""A token sequence on its way through the model, and where its keys and values lie."""

from __future__ import annotations

import numpy as np

from runtime.embedded.cache_node import EMPTY, CacheNode
from runtime.embedded.draft_tree import DraftBranch, DraftTree, OfferedCandidates

Order = tuple[int, int, int]


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
        self.offers: OfferedCandidates = {}

    def begin(self, tokens: np.ndarray, anchor: CacheNode, cached: np.ndarray) -> None:
        """It starts from ``tokens``; ``cached``: slots of the first of them, down to ``anchor``."""
        self.tokens = np.zeros(self.size, dtype=np.int64)
        self.tokens[: len(tokens)] = tokens
        self.slots = np.full(self.size, -1, dtype=np.int64)
        self.slots[: len(cached)] = cached
        self.anchor, self.live = anchor, True
        self.length, self.proposed, self.forks, self.offers = len(tokens), 0, [], {}
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
        self.forks, self.offers = guesses.forks, guesses.offers

    def retract(self) -> DraftTree:
        """Take the guesses back, and what was computed of them. The forks' slots go with them."""
        known = self.known
        guesses = DraftTree(self.tokens[known : self.length].tolist(), self.forks, self.offers)
        self.length, self.proposed, self.forks, self.offers = known, 0, [], {}
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
