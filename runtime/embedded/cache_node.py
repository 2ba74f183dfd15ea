"""A node of the radix tree of cached tokens, and the index of the steps that end at nodes, so that
an eviction knows what a leaf is worth.

A step is filed at the node where the cached part of its path ends. A step whose path is not cached
completely is filed higher up, or nowhere if a complete step of the same search ends at that node,
because that one is worth no less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

EMPTY = np.empty(0, dtype=np.int64)
TOKEN_BYTES = 8

StepId = tuple[str, int]
"""A step by its search's name and its node's id; the id is below ``ROOT`` if no node has it."""


class CacheNode:
    """An edge of the tree and its children. ``tokens`` and ``slots``: int64, equally long.

    ``holders``: the running searches that hold it; ``pinned``: it stays cached without holders;
    ``locks``: how many running sequences have it on their path; ``stamp``: when it was last used;
    ``steps``: the steps whose cached part ends here.
    """

    __slots__ = (
        "children",
        "holders",
        "locks",
        "parent",
        "pinned",
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
        self.pinned = False
        self.locks = 0
        self.stamp = 0
        self.steps: set[StepId] = set()


@dataclass(slots=True)
class StepEnd:
    """A step's ``path`` (int64 token ids as bytes) and the ``node`` at which its cached part ends,
    None if a complete step stands for it. ``complete``: the whole path is cached; ``evicted``: part
    of the path was evicted; ``changed``: its cached part has changed since the last
    ``take_changed``."""

    path: bytes
    node: CacheNode | None
    complete: bool
    evicted: bool = False
    changed: bool = False

    @property
    def length(self) -> int:
        """Tokens of the path."""
        return len(self.path) // TOKEN_BYTES


class StepIndex:
    """The steps of one radix tree. The tree reports to it what is cached and what is evicted."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[int, StepEnd]] = {}

    def end_of(self, step: StepId) -> StepEnd | None:
        """A step's entry; None for an unknown step."""
        tree, number = step
        return self._ends.get(tree, {}).get(number)

    def node_of(self, step: StepId) -> CacheNode | None:
        """The node at which a step is filed; None if it is filed nowhere."""
        end = self.end_of(step)
        return None if end is None else end.node

    def filed(self, tree: str) -> np.ndarray:
        """The ids of a search's steps that are filed at a node, int64."""
        ends = self._ends.get(tree, {}).items()
        return np.array([n for n, end in ends if end.node is not None], dtype=np.int64)

    def put(self, step: StepId, path: bytes, node: CacheNode, cached: int) -> None:
        """File a step at the node where the first ``cached`` tokens of its path end."""
        tree, number = step
        previous = self.end_of(step)
        changed = previous is not None and (previous.evicted or previous.changed)
        self.remove(step)
        complete = cached >= len(path) // TOKEN_BYTES
        self._ends.setdefault(tree, {})[number] = StepEnd(path, node, complete, changed=changed)
        node.steps.add(step)

    def remove(self, step: StepId) -> None:
        """Forget a step; an unknown one is ignored."""
        tree, number = step
        end = self._ends.get(tree, {}).pop(number, None)
        if end is not None and end.node is not None:
            end.node.steps.remove(step)

    def remove_tree(self, tree: str) -> None:
        """Forget all steps of a search."""
        for number in list(self._ends.get(tree, ())):
            self.remove((tree, number))
        self._ends.pop(tree, None)

    def evict(self, step: StepId) -> StepEnd:
        """Note that a step's path is no longer cached completely; returns its entry."""
        tree, number = step
        end = self._ends[tree][number]
        end.complete, end.evicted, end.changed = False, True, True
        return end

    def move_up(self, node: CacheNode, above: CacheNode) -> None:
        """File the steps of a node that is removed at ``above``, or nowhere if a complete step of
        the same search ends there."""
        complete = {tree for tree, number in above.steps if self._ends[tree][number].complete}
        for step in node.steps:
            end = self.evict(step)
            end.node = None if step[0] in complete else above
            if end.node is not None:
                above.steps.add(step)
        node.steps = set()

    def restorable(self, tree: str, path: bytes, since: int) -> list[tuple[int, bytes]]:
        """The incomplete steps that end on a ``path`` that is cached now, after its first ``since``
        tokens: their ids and paths."""
        return [
            (number, end.path)
            for number, end in self._ends.get(tree, {}).items()
            if not end.complete and since < end.length and path.startswith(end.path)
        ]

    def take_changed(self, tree: str) -> dict[int, bytes]:
        """The steps whose cached part has changed since the last call, with their paths.

        Tokens that were never cached, such as the last one sampled, do not count as evicted.
        """
        changed = {n: end for n, end in self._ends.get(tree, {}).items() if end.changed}
        for end in changed.values():
            end.changed = False
        return {number: end.path for number, end in changed.items()}

    def check(self, nodes: Iterable[CacheNode]) -> None:
        """Raise AssertionError unless the index and the nodes agree on where steps are filed."""
        ends = {(t, n): end for t, numbers in self._ends.items() for n, end in numbers.items()}
        filed = {step: end.node for step, end in ends.items() if end.node is not None}
        assert {step: n for n in nodes for step in n.steps} == filed, "steps"
        assert all(end.node or not end.complete for end in ends.values()), "a whole step is lost"
