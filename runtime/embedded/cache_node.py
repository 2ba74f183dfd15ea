"""A node of the radix tree of cached tokens."""

from __future__ import annotations

import numpy as np

EMPTY = np.empty(0, dtype=np.int64)
TOKEN_BYTES = 8

StepId = tuple[str, int]
"""A step by its search's name and its node's id, below ``ROOT`` if it is no node's."""


class CacheNode:
    """An edge and what hangs below it. ``tokens`` and ``slots``: int64, equally long.

    ``holders``: the searches in flight that hold it; ``kept``: stays as cache when nobody does;
    ``locks``: running sequences whose path goes through it; ``stamp``: when it was last used;
    ``steps``: the steps of which what is cached ends here.
    """

    __slots__ = (
        "children",
        "holders",
        "kept",
        "locks",
        "parent",
        "serial",
        "slots",
        "stamp",
        "steps",
        "tokens",
    )

    def __init__(
        self, parent: CacheNode | None, tokens: np.ndarray, slots: np.ndarray, serial: int
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.serial = serial
        self.children: dict[int, CacheNode] = {}
        self.holders: set[str] = set()
        self.kept = False
        self.locks = 0
        self.stamp = 0
        self.steps: set[StepId] = set()
