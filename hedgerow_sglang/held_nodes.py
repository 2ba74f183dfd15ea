"""Which blocks of searches hold which radix tree nodes, updated as nodes come, split and go.

Pure: of SGLang's nodes only ``id`` and ``parent`` are read. A block whose path is cached only in
part is listed under the node where the cached part ends and the key of the child that would follow,
so that the block is found when that child is inserted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from typing import Any

Block = tuple[str, int]
"""The name of a search's tree and the id of a step's node."""

Place = tuple[Any, int]
"""A node of the radix tree and how many tokens lead to its end."""


class HeldNodes:
    """Tables from nodes to the blocks that hold them, and from blocks to their nodes."""

    def __init__(self) -> None:
        self._holders: dict[int, set[Block]] = {}
        self._nodes: dict[Block, dict[int, Any]] = {}
        self._beyond: defaultdict[int, dict[Hashable, set[Block]]] = defaultdict(dict)
        self._where: dict[Block, tuple[int, Hashable]] = {}
        self._ends: dict[Block, Place] = {}

    def clear(self) -> None:
        """Forget all blocks: nothing is cached any more."""
        for table in (self._holders, self._nodes, self._beyond, self._where, self._ends):
            table.clear()

    def holders(self, node: Any) -> Collection[Block]:
        """The blocks that hold a node."""
        return self._holders.get(node.id, ())

    def nodes(self, block: Block) -> Iterable[Any]:
        """The nodes that a block holds."""
        return self._nodes.get(block, {}).values()

    def hold(self, block: Block, node: Any) -> None:
        """Record that the block's tokens are in this node."""
        self._holders.setdefault(node.id, set()).add(block)
        self._nodes.setdefault(block, {})[node.id] = node

    def end(self, block: Block) -> Place | None:
        """Where the cached part of a block's path ends; None where that is not tracked. It is while
        the block holds that node or waits for its next child, and so learns of its removal."""
        return self._ends.get(block)

    def ends_at(self, block: Block, place: Place, key: Hashable | None) -> None:
        """Record that the cached part of the block's path ends at ``place``; ``key``: of the child
        that would continue it, None if the whole path is cached."""
        self._ends[block] = place
        if key is not None:
            at = place[0].id
            self._beyond[at].setdefault(key, set()).add(block)
            self._where[block] = at, key

    def go_on(self, node: Any, key: Hashable) -> set[Block]:
        """Remove and return the blocks that waited at ``node`` for the child ``key``, now there."""
        blocks_by_key = self._beyond.get(node.id)
        blocks = blocks_by_key.pop(key, None) if blocks_by_key else None
        if not blocks:
            return set()
        self._tidy(node.id)
        for block in blocks:
            del self._where[block], self._ends[block]
        return blocks

    @property
    def whole(self) -> bool:
        """Whether every block's path is cached to its end."""
        return not self._where

    def split(self, upper: Any, lower: Any) -> None:
        """Record that the first part of ``lower`` has become the node ``upper``."""
        for block in self._holders.get(lower.id, ()):
            self.hold(block, upper)

    def remove(self, leaf: Any, key: Hashable, tokens: int) -> None:
        """Record that a leaf of ``tokens`` tokens is freed; ``key``: its key in its parent."""
        blocks = self._holders.pop(leaf.id, set())
        for block in blocks:
            del self._nodes[block][leaf.id]
        for waiting in self._beyond.pop(leaf.id, {}).values():
            blocks |= waiting
        for block in blocks:
            _, at = self._ends[block]
            self.ends_at(block, (leaf.parent, at - tokens), key)

    def release(self, block: Block) -> list[Any]:
        """Forget a block; returns the nodes that it held."""
        self._ends.pop(block, None)
        nodes = list(self._nodes.pop(block, {}).values())
        for node in nodes:
            holders = self._holders[node.id]
            holders.discard(block)
            if not holders:
                del self._holders[node.id]
        if block in self._where:
            at, key = self._where.pop(block)
            self._beyond[at][key].discard(block)
            if not self._beyond[at][key]:
                del self._beyond[at][key]
            self._tidy(at)
        return nodes

    def _tidy(self, node: int) -> None:
        if not self._beyond[node]:
            del self._beyond[node]
