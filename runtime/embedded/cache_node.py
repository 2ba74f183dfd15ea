"""A node of the radix tree of cached tokens, and the index of the steps that end at nodes, so that
an eviction knows what a leaf is worth.

A step is filed at the node where what is cached of its path ends. Of a step of which not all is
cached that is higher up, or nowhere: then a whole step of the same search ends there, which is
worth no less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(slots=True)
class StepEnd:
    """A step's ``path`` (int64 token ids as bytes) and the ``node`` at which what is cached of it
    ends, None if a whole step stands for it. ``complete``: all of the path is cached;
    ``evicted``: some of it was, and is no more; ``changed``: more or less is cached than at the
    last ``take_changed``."""

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
    """The steps of one radix tree, which tells it of what is cached and what goes."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[int, StepEnd]] = {}

    def end_of(self, step: StepId) -> StepEnd | None:
        """Where a step ends; None for an unknown one."""
        tree, number = step
        return self._ends.get(tree, {}).get(number)

    def node_of(self, step: StepId) -> CacheNode | None:
        """The node at which a step is filed; None if there is none."""
        end = self.end_of(step)
        return None if end is None else end.node

    def filed(self, tree: str) -> np.ndarray:
        """The steps of a search that are filed at a node, int64."""
        ends = self._ends.get(tree, {}).items()
        return np.array([n for n, end in ends if end.node is not None], dtype=np.int64)

    def put(self, step: StepId, path: bytes, node: CacheNode, cached: int) -> None:
        """File a step at the node where the first ``cached`` tokens of its path end."""
        tree, number = step
        before = self.end_of(step)
        changed = before is not None and (before.evicted or before.changed)
        self.remove(step)
        complete = cached >= len(path) // TOKEN_BYTES
        self._ends.setdefault(tree, {})[number] = StepEnd(path, node, complete, changed=changed)
        node.steps.add(step)

    def remove(self, step: StepId) -> None:
        """A step is over; an unknown one passes."""
        tree, number = step
        end = self._ends.get(tree, {}).pop(number, None)
        if end is not None and end.node is not None:
            end.node.steps.remove(step)

    def remove_tree(self, tree: str) -> None:
        """A search is over."""
        for number in list(self._ends.get(tree, ())):
            self.remove((tree, number))
        self._ends.pop(tree, None)

    def evict(self, step: StepId) -> StepEnd:
        """Not all of a step's path is cached any more."""
        tree, number = step
        end = self._ends[tree][number]
        end.complete, end.evicted, end.changed = False, True, True
        return end

    def move_up(self, node: CacheNode, above: CacheNode) -> None:
        """A node goes: what is cached of its steps ends at ``above``. Where a whole step of the
        same search ends there, that one stands for them."""
        whole = {tree for tree, number in above.steps if self._ends[tree][number].complete}
        for step in node.steps:
            end = self.evict(step)
            end.node = None if step[0] in whole else above
            if end.node is not None:
                above.steps.add(step)
        node.steps = set()

    def restorable(self, tree: str, path: bytes, since: int) -> list[tuple[int, bytes]]:
        """Incomplete steps that end on a path that is cached now, after ``since`` tokens of it;
        each with its own path."""
        return [
            (number, end.path)
            for number, end in self._ends.get(tree, {}).items()
            if not end.complete and since < end.length and path.startswith(end.path)
        ]

    def take_changed(self, tree: str) -> dict[int, bytes]:
        """The steps of which more or less is cached than at the last call, with their paths.

        What was never cached, such as the last token sampled, was not evicted.
        """
        changed = {n: end for n, end in self._ends.get(tree, {}).items() if end.changed}
        for end in changed.values():
            end.changed = False
        return {number: end.path for number, end in changed.items()}

    def check(self, nodes: Iterable[CacheNode]) -> None:
        """Raise AssertionError unless steps are filed where the index has them."""
        ends = {(t, n): end for t, numbers in self._ends.items() for n, end in numbers.items()}
        filed = {step: end.node for step, end in ends.items() if end.node is not None}
        assert {step: n for n in nodes for step in n.steps} == filed, "steps"
        assert all(end.node or not end.complete for end in ends.values()), "a whole step is lost"
