"""What a draft foresees of a branch: a chain of tokens, and forks where there are two ways on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtime.embedded.cache_node import EMPTY


@dataclass(slots=True, eq=False)
class DraftBranch:
    """Tokens that may come after the first ``at`` guesses of the way ``above`` (None: the chain).

    While a pass needs them, its first ``computed`` tokens have keys and values in ``slots``.
    """

    above: DraftBranch | None
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
        """Guesses on the way to its end."""
        return self.at + len(self.tokens)


@dataclass(slots=True, eq=False)
class DraftTree:
    """``tokens``: the likeliest way on; ``forks``: others, each after the one it leaves.

    The rows of a pass that checks them stand in this order: what was known last, the chain, the
    forks.
    """

    tokens: list[int] = field(default_factory=list)
    forks: list[DraftBranch] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Guessed tokens in all."""
        return len(self.tokens) + sum(len(fork.tokens) for fork in self.forks)

    def at(self, way: DraftBranch | None, depth: int) -> Iterator[tuple[int, DraftBranch | None]]:
        """The tokens guessed next after ``depth`` guesses along a way, the likeliest first, each
        with the way it lies on."""
        tokens, start = (self.tokens, 0) if way is None else (way.tokens, way.at)
        if depth - start < len(tokens):
            yield tokens[depth - start], way
        for fork in self.forks:
            if fork.above is way and fork.at == depth:
                yield fork.tokens[0], fork

    def row(self, way: DraftBranch | None, depth: int) -> int:
        """The row of the pass that stands after ``depth`` guesses along a way."""
        if way is None:
            return depth
        before = self.forks[: self.forks.index(way)]
        return sum(len(fork.tokens) for fork in before) + len(self.tokens) + depth - way.at
