"""A token sequence on its way through the model, and where its keys and values lie."""

from __future__ import annotations

import numpy as np

from runtime.embedded.radix import Node

Order = tuple[int, int, int]


class Lane:
    """One sequence: its first ``shared`` tokens are the radix tree's (locked), the rest is its own.

    ``tokens`` and ``slots`` are int64 buffers of the final length; ``length`` tokens are known,
    ``computed`` of them have keys and values, ``allocated`` have slots. ``order`` says who goes
    first and who gives way. A lane's private tokens are those from ``shared`` to ``allocated``.
    """

    __slots__ = (
        "allocated",
        "anchor",
        "computed",
        "length",
        "opened",
        "order",
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
