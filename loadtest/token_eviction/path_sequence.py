"""A wave under way: the paths it grows from, and one branch's step on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpolicy.eviction_order import Ints
from kvpolicy.value import Floats
from loadtest.token_eviction.sparse_forward import SparseInput
from loadtest.token_eviction.token_cache import CachedBlock, TokenCache
from search.engine import Branch
from search.tree import Finish


@dataclass(frozen=True, slots=True)
class CachedPath:
    """What is held of a path while a wave grows from its end; nothing of it goes meanwhile.

    ``blocks``: each one's id, and which of its tokens are there. ``slots`` and ``places`` (n,): of
    all of these; ``length``: tokens of the path, held or not; ``logits`` (vocab,) after the last.
    """

    blocks: Sequence[tuple[int, Ints]]
    slots: Ints
    places: Ints
    length: int
    logits: np.ndarray

    @classmethod
    def to(cls, leaf: int, held: TokenCache, logits: np.ndarray) -> CachedPath:
        """The path down to a block, as it is now."""
        chain = held.chain(leaf)
        there = [(name, held[name].there) for name in chain]
        return cls(there, *held.slots(chain), held.length(leaf), logits)

    @property
    def leaf(self) -> int:
        """The block that steps grow from."""
        return self.blocks[-1][0]


@dataclass(slots=True, eq=False)
class PathSequence:
    """One branch's step. ``paid`` (n,): attention to what is held of the path; ``within``: to each
    token of the step itself, as ``slots`` those that have been fed."""

    branch: Branch
    path: CachedPath
    logits: np.ndarray
    paid: Floats
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    within: Floats = field(default_factory=lambda: np.zeros(0))
    logprob: float = 0.0
    entropy: float = 0.0
    finish: Finish | None = None

    @classmethod
    def start(cls, branch: Branch, path: CachedPath) -> PathSequence:
        """Nothing is drawn yet."""
        return cls(branch, path, path.logits, np.zeros(len(path.slots)))

    @property
    def length(self) -> int:
        """Tokens of the prefix and of the step: the position of the token to draw next."""
        return self.path.length + len(self.tokens)

    def take(self, token: int, logprob: float, entropy: float) -> None:
        """A token was drawn."""
        self.tokens.append(token)
        self.logprob += logprob
        self.entropy = entropy

    def reading(self) -> SparseInput:
        """A row for the token just drawn, which has its slot."""
        start, own = self.path.length, np.array(self.slots, dtype=np.int64)
        at = np.array([start + len(self.slots) - 1])
        keys = np.concatenate([self.path.slots, own])
        places = np.concatenate([self.path.places, np.arange(start, start + len(own))])
        return SparseInput(np.array(self.tokens[-1:]), at, own[-1:], keys, places)

    def hear(self, logits: np.ndarray, mass: Floats) -> None:
        """What came of the row."""
        before = len(self.path.slots)
        self.logits = logits
        self.paid += mass[:before]
        self.within = np.append(self.within, 0.0) + mass[before:]

    def block(self) -> CachedBlock:
        """The step as a block: all of its tokens have been fed."""
        made = CachedBlock.of(
            self.path.leaf, self.path.length, np.array(self.tokens, dtype=np.int64)
        )
        made.put(np.arange(len(self.slots)), np.array(self.slots, dtype=np.int64))
        made.within[:] = self.within
        return made
