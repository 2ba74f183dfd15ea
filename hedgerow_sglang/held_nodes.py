"""Which blocks of searches hold which nodes of the radix tree, kept as nodes come, split and go.

Pure: nodes are SGLang's, of which only ``id``, ``parent`` and who holds them matter here. A block's
path that is not cached whole is found again, when tokens are put into the tree, by the node where
what is cached of it ends and the key of the child that would follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from typing import Any

Block = tuple[str, int]
"""A search's tree and the node of a step."""

Place = tuple[Any, int]
"""A node of the radix tree and how many tokens lead to its end."""


class HeldNodes:
    """Blocks by nodes, and nodes by blocks."""

    def __init__(self) -> None:
        self._holders: dict[int, set[Block]] = {}
        self._nodes: dict[Block, dict[int, Any]] = {}
        self._beyond: defaultdict[int, dict[Hashable, set[Block]]] = defaultdict(dict)
        self._where: dict[Block, tuple[int, Hashable]] = {}
        self._ends: dict[Block, Place] = {}

    def clear(self) -> None:
        """Nothing is cached any more."""
        for table in (self._holders, self._nodes, self._beyond, self._where, self._ends):
            table.clear()

    def holders(self, node: Any) -> Collection[Block]:
        """The blocks that hold a node."""
        return self._holders.get(node.id, ())

    def nodes(self, block: Block) -> Iterable[Any]:
        """The nodes that a block holds."""
        return self._nodes.get(block, {}).values()

    def hold(self, block: Block, node: Any) -> None:
        """The block's tokens are in this node."""
        self._holders.setdefault(node.id, set()).add(block)
        self._nodes.setdefault(block, {})[node.id] = node

    def end(self, block: Block) -> Place | None:
        """Where what is cached of a block's path ends, if the block holds that node or misses the
        next: then it hears of the node's removal."""
        return self._ends.get(block)

    def ends_at(self, block: Block, place: Place, key: Hashable | None) -> None:
        """What is cached of the block's path ends here; ``key``: of the child that would go on, if
        that is not all."""
        self._ends[block] = place
        if key is not None:
            at = place[0].id
            self._beyond[at].setdefault(key, set()).add(block)
            self._where[block] = at, key

    def go_on(self, node: Any, key: Hashable) -> set[Block]:
        """The blocks whose paths ended with this node before a child of that key: there is one."""
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
        """Whether everything that is held is cached."""
        return not self._where

    def split(self, upper: Any, lower: Any) -> None:
        """A node's first part has become a node of its own."""
        for block in self._holders.get(lower.id, ()):
            self.hold(block, upper)

    def remove(self, leaf: Any, key: Hashable, tokens: int) -> None:
        """A leaf of so many tokens goes; ``key``: as its parent's child."""
        blocks = self._holders.pop(leaf.id, set())
        for block in blocks:
            del self._nodes[block][leaf.id]
        for waiting in self._beyond.pop(leaf.id, {}).values():
            blocks |= waiting
        for block in blocks:
            _, at = self._ends[block]
            self.ends_at(block, (leaf.parent, at - tokens), key)

    def release(self, block: Block) -> list[Any]:
        """A block is no more; the nodes that it held."""
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
