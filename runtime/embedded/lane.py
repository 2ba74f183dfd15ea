"""A token sequence on its way through the model, and where its keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.embedded.radix import Node

Order = tuple[int, int, int]


class Lane:
    """One sequence: its first ``shared`` tokens are the radix tree's (locked), the rest is its own.

    ``tokens`` and ``slots`` are int64 buffers of the final length; ``length`` tokens are known,
    ``computed`` of them have keys and values, ``allocated`` have slots. The last ``proposed`` known
    tokens are guesses that the next pass is to check. ``order`` says who goes first and who gives
    way. A lane's private tokens are those from ``shared`` to ``allocated``.
    """

    __slots__ = (
        "allocated",
        "anchor",
        "computed",
        "length",
        "opened",
        "order",
        "proposed",
        "shared",
        "slots",
        "tokens",
        "tree",
    )

    def __init__(
        self,
        tree: str,
        order: Order,
        tokens: np.ndarray,
        *,
        size: int,
        anchor: Node,
        cached: np.ndarray,
    ) -> None:
        """``size``: the most tokens it may come to; ``cached``: slots of its first tokens."""
        self.tree = tree
        self.order = order
        self.tokens = np.zeros(size, dtype=np.int64)
        self.tokens[: len(tokens)] = tokens
        self.slots = np.full(size, -1, dtype=np.int64)
        self.slots[: len(cached)] = cached
        self.anchor = anchor
        self.length = len(tokens)
        self.proposed = 0
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

    def propose(self, tokens: Sequence[int]) -> None:
        """Add guesses, to be taken back by ``retract`` after the pass that checks them."""
        end = self.length + len(tokens)
        self.tokens[self.length : end] = tokens
        self.length, self.proposed = end, len(tokens)

    def retract(self) -> list[int]:
        """Take the guesses back, and what was computed of them; the guesses."""
        known = self.length - self.proposed
        guesses = self.tokens[known : self.length].tolist()
        self.length, self.proposed = known, 0
        self.computed = min(self.computed, known)
        return guesses

    def confirm(self, token: int) -> None:
        """Add a token just drawn that equals the guess whose keys and values are still there."""
        self.append(token)
        self.computed += 1
