"""What one tree holds: the keys and values of some tokens of each of its blocks.

A block is one node's step, block 0 the prompt. Nodes with the same step below the same block share
it, as they would in a radix tree; nothing is shared with other trees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvpolicy.eviction_order import Ints
from kvpolicy.value import Floats
from loadtest.token_eviction.path_cache import PartialPath
from search.tree import ROOT


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A step's tokens (n,) from absolute position ``start`` on, all of them held at first.

    ``there`` (m,): which are held, counted within the block, rising; ``kv`` (layers, 2, heads, m,
    head_dim): their keys and values. ``within`` and ``later`` (n,): the attention that tokens of
    the block and after it have paid to each. ``nodes``: those whose step it is.
    """

    parent: int
    start: int
    tokens: Ints
    kv: Tensor
    within: Floats
    later: Floats = field(init=False)
    there: Ints = field(init=False)
    nodes: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.later = np.zeros(len(self.tokens))
        self.there = np.arange(len(self.tokens))

    @property
    def end(self) -> int:
        """Tokens from the prompt's start to the block's end, held or not."""
        return self.start + len(self.tokens)

    @property
    def missing(self) -> int:
        """How many of its tokens are not held."""
        return len(self.tokens) - len(self.there)

    def keep(self, ranks: Ints) -> None:
        """Evict all held tokens but these, given by their rank."""
        self.there, self.kv = self.there[ranks], self.kv[..., ranks, :]

    def put(self, places: Ints, kv: Tensor) -> None:
        """Hold those of some absolute positions that lie in the block, replacing any held there."""
        inside = np.flatnonzero((places >= self.start) & (places < self.end))
        which = places[inside] - self.start
        self.keep(np.flatnonzero(~np.isin(self.there, which)))
        self.there = np.concatenate([self.there, which])
        self.kv = torch.cat([self.kv, kv[..., inside, :]], -2)
        self.keep(np.argsort(self.there))


class TokenCache:
    """The ``blocks`` of one tree by id, in order of arrival; ``block_of``: the block that each
    node's step is, of those that have one."""

    def __init__(self, capacity: int, prompt: CachedBlock) -> None:
        """``capacity``: tokens that may be held at once, steps under way included."""
        self.capacity = capacity
        self.blocks = {ROOT: prompt}
        self.block_of = {ROOT: ROOT}
        self._same: dict[tuple[int, bytes], int] = {}

    @property
    def count(self) -> int:
        """Tokens held of all blocks."""
        return sum(len(block.there) for block in self.blocks.values())

    def chain(self, name: int) -> dict[int, CachedBlock]:
        """The blocks from the prompt down to this one."""
        names = []
        while name >= ROOT:
            names.append(name)
            name = self.blocks[name].parent
        return {name: self.blocks[name] for name in reversed(names)}

    def path(self, leaf: int) -> PartialPath:
        """What is held from the prompt to a block's end."""
        chain = self.chain(leaf).values()
        places = np.concatenate([block.start + block.there for block in chain])
        return PartialPath(places, torch.cat([block.kv for block in chain], -2))

    def add(self, node: int, block: CachedBlock) -> bool:
        """Add a step that has ended; False if there is an equal block, which the node then shares.

        Tokens that are missing in the equal block are taken from the new one.
        """
        name = self._same.setdefault((block.parent, block.tokens.tobytes()), node)
        same = self.blocks.setdefault(name, block)
        same.nodes.add(node)
        self.block_of[node] = name
        if same is not block:
            gaps = np.setdiff1d(block.there, same.there)
            same.put(block.start + gaps, block.kv[..., gaps, :])
        return same is block

    def mark_dead(self, nodes: Iterable[int]) -> list[int]:
        """Drop nodes that will not be visited again; the blocks dropped with their last node."""
        dead = []
        for node in self.block_of.keys() & set(nodes):
            name = self.block_of.pop(node)
            block = self.blocks[name]
            block.nodes.discard(node)
            if not block.nodes:
                dead.append(name)
                del self.blocks[name], self._same[block.parent, block.tokens.tobytes()]
        return dead
