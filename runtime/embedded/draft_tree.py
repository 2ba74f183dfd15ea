"""What a draft model proposes for a branch: a main chain of tokens, and chains that leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtime.embedded.cache_node import EMPTY


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
