"""What one tree holds: the keys and values of some tokens of each of its blocks.

A block is one node's step, block 0 the prompt. Nodes that say the same below the same block share
it, as they would in a radix tree; nothing is shared with other trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpolicy.eviction_order import Ints
from kvpolicy.value import Floats
from runtime.embedded.prefix_cache import KvPool
from search.tree import ROOT

GIVEN_UP = -1


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A step's tokens (n,) from absolute position ``start`` on.

    ``slots`` (n,): where each one's keys and values lie, -1 where they were given up or are not
    there yet; ``held``: how many are. ``later`` and ``within`` (n,): attention that tokens after
    the block and in it have paid to each, the mean over a slice's heads. ``nodes``: who says this.
    """

    parent: int
    start: int
    tokens: Ints
    slots: Ints
    later: Floats
    within: Floats
    held: int = 0
    nodes: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, parent: int, start: int, tokens: Ints) -> CachedBlock:
        """Nothing of it is there yet."""
        none = np.zeros(len(tokens))
        return cls(parent, start, tokens, np.full(len(tokens), GIVEN_UP), none, none.copy())

    @property
    def there(self) -> Ints:
        """Which of its tokens are held, counted within the block, rising."""
        return np.flatnonzero(self.slots != GIVEN_UP)

    @property
    def missing(self) -> Ints:
        """Which are not."""
        return np.flatnonzero(self.slots == GIVEN_UP)

    def put(self, which: Ints, slots: Ints) -> None:
        """Tokens (within the block) that were not there lie in these slots now."""
        self.slots[which] = slots
        self.held += len(which)

    def take(self, which: Ints) -> Ints:
        """The slots of tokens (within the block) that are given up."""
        slots = self.slots[which]
        self.slots[which] = GIVEN_UP
        self.held -= len(which)
        return slots


class TokenCache:
    """The blocks of one tree by id, in order of arrival, and the slots of its KV store."""

    def __init__(self, capacity: int, prompt: Ints) -> None:
        """``capacity``: tokens that may be held at once. Nothing of the prompt is there yet."""
        self.pool = KvPool(capacity)
        self.blocks: dict[int, CachedBlock] = {ROOT: CachedBlock.of(-1, 0, prompt)}
        self.blocks[ROOT].nodes.add(ROOT)
        self._block_of: dict[int, int] = {ROOT: ROOT}
        self._same: dict[tuple[int, bytes], int] = {}

    def __getitem__(self, block: int) -> CachedBlock:
        return self.blocks[block]

    @property
    def count(self) -> int:
        """Tokens held, steps under way included."""
        return self.pool.capacity - self.pool.available

    def block_of(self, node: int) -> int | None:
        """The block that a node's step is; None if there is none, or none any more."""
        return self._block_of.get(node)

    def chain(self, block: int) -> list[int]:
        """The blocks from the prompt down to this one."""
        found = []
        while block >= ROOT:
            found.append(block)
            block = self.blocks[block].parent
        return found[::-1]

    def length(self, block: int) -> int:
        """Tokens from the prompt's start to the block's end, held or not."""
        return self.blocks[block].start + len(self.blocks[block].tokens)

    def slots(self, chain: Iterable[int]) -> tuple[Ints, Ints]:
        """Slots and absolute positions of all that is held of these blocks, in their order."""
        blocks = [self.blocks[name] for name in chain]
        there = [block.there for block in blocks]
        slots = [block.slots[at] for block, at in zip(blocks, there, strict=True)]
        places = [block.start + at for block, at in zip(blocks, there, strict=True)]
        return np.concatenate(slots), np.concatenate(places)

    def add(self, node: int, block: CachedBlock) -> bool:
        """A step has ended; False if there is a block that says the same, which it then shares.

        What is missing of that one, the new one brings.
        """
        key = block.parent, block.tokens.tobytes()
        name = self._same.setdefault(key, node)
        self._block_of[node] = name
        same = self.blocks.setdefault(name, block)
        same.nodes.add(node)
        if same is not block:
            gap = same.missing
            same.put(gap, block.take(gap))
            self.drop(block, block.there)
        return same is block

    def mark_dead(self, nodes: Iterable[int]) -> list[int]:
        """These will not be visited again; the blocks that go with the last of their nodes."""
        dead = []
        for node in nodes:
            name = self._block_of.pop(node, None)
            if name is None:
                continue
            block = self.blocks[name]
            block.nodes.discard(node)
            if not block.nodes:
                dead.append(name)
                del self.blocks[name], self._same[block.parent, block.tokens.tobytes()]
                self.drop(block, block.there)
        return dead

    def restore(self, block: CachedBlock, which: Ints) -> None:
        """Slots for tokens (within the block) that are not there; they must be free."""
        block.put(which, self.pool.allocate(len(which)))

    def drop(self, block: CachedBlock, which: Ints) -> None:
        """Give up tokens (within the block) that are there."""
        self.pool.free(block.take(which))

    def keep(self, block: CachedBlock, which: Ints) -> None:
        """Give up all that is there but ``which`` of the held tokens, by their rank among them."""
        there = block.there
        gone = np.ones(len(there), dtype=np.bool_)
        gone[which] = False
        self.drop(block, there[gone])

    def check(self, under_way: Iterable[Sequence[int]] = ()) -> None:
        """Prove that every slot is free or one token's, and that counts are right.

        ``under_way``: slots of tokens that are of no block yet.
        """
        used = [block.slots[block.there] for block in self.blocks.values()]
        counts = [block.held for block in self.blocks.values()]
        assert counts == [len(slots) for slots in used], "a block's count is wrong"
        also = [np.array(slots, dtype=np.int64) for slots in under_way]
        found = np.sort(np.concatenate([self.pool.free_slots(), *used, *also]))
        assert np.array_equal(found, np.arange(self.pool.capacity)), "a slot is lost or used twice"
