"""Where the steps of searches end in a radix tree, so that a trim can ask what a leaf is worth.

A mark stands where what is cached of its step's path ends. Of a step of which not all is cached the
mark stands higher up, or is gone: then a whole step of the same search ends there, which is worth
no less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from search.tree import ROOT

if TYPE_CHECKING:
    from runtime.embedded.radix_tree import CacheNode

StepId = tuple[str, int]
"""A step by its search's name and its node's id, below ``ROOT`` if it is no node's."""

TOKEN_BYTES = 8
NO_STEPS = np.empty(0, dtype=np.int64)


class StepIndex:
    """The marks of one radix tree, which tells it of what is cached and what goes."""

    def __init__(self) -> None:
        self._where: dict[StepId, CacheNode] = {}
        self._standing: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._nameless: defaultdict[str, set[int]] = defaultdict(set)
        self._paths: defaultdict[str, dict[StepId, bytes]] = defaultdict(dict)
        self._cut: defaultdict[str, defaultdict[int, set[StepId]]] = defaultdict(_sets)
        self._lost: defaultdict[str, set[StepId]] = defaultdict(set)
        self._moved: defaultdict[str, set[StepId]] = defaultdict(set)

    def where(self, mark: StepId) -> CacheNode | None:
        """The node at which a mark stands; None if there is none."""
        return self._where.get(mark)

    def standing(self, tree: str) -> np.ndarray:
        """The steps of a search that have a mark, int64, rising."""
        flags, nameless = self._standing.get(tree), self._nameless.get(tree)
        steps = np.flatnonzero(np.frombuffer(flags, dtype=np.uint8)) if flags else NO_STEPS
        return np.concatenate([np.array(sorted(nameless)), steps]) if nameless else steps

    def whole(self, mark: StepId) -> bool:
        """Whether all of a step's path is cached."""
        tree = mark[0]
        return mark in self._where and mark not in self._cut[tree].get(self.length(mark), ())

    def length(self, mark: StepId) -> int:
        """Tokens of a step's path."""
        return len(self._paths[mark[0]][mark]) // TOKEN_BYTES

    def put(self, mark: StepId, path: bytes, node: CacheNode, cached: int) -> None:
        """Put a mark at a node where the first ``cached`` tokens of its path end."""
        if mark in self._paths[mark[0]]:
            if mark in self._lost[mark[0]]:
                self._moved[mark[0]].add(mark)
            self.remove(mark)
        node.marks.add(mark)
        self._where[mark] = node
        self._stand(mark)
        self._paths[mark[0]][mark] = path
        if cached < self.length(mark):
            self._cut[mark[0]][self.length(mark)].add(mark)

    def remove(self, mark: StepId) -> None:
        """A step is over; an unknown one passes."""
        if mark not in self._paths[mark[0]]:
            return
        self._cut[mark[0]][self.length(mark)].discard(mark)
        self._lost[mark[0]].discard(mark)
        del self._paths[mark[0]][mark]
        node = self._where.get(mark)
        if node is not None:
            node.marks.remove(mark)
            self._vanish(mark)

    def remove_all(self, tree: str) -> None:
        """A search is over."""
        for mark in list(self._paths[tree]):
            self.remove(mark)
        for of_tree in (self._standing, self._nameless, self._paths):
            of_tree.pop(tree, None)
        for of_tree in (self._cut, self._lost, self._moved):
            of_tree.pop(tree, None)

    def lose(self, mark: StepId) -> None:
        """Not all of a step's path is cached any more."""
        self._cut[mark[0]][self.length(mark)].add(mark)
        self._lost[mark[0]].add(mark)
        self._moved[mark[0]].add(mark)

    def moved(self, tree: str) -> dict[StepId, bytes]:
        """The steps of which more or less is cached than at the last call, with their paths.

        What was never cached, such as the last token drawn, was not lost.
        """
        paths = self._paths.get(tree, {})
        return {mark: paths[mark] for mark in self._moved.pop(tree, ()) if mark in paths}

    def lift(self, node: CacheNode, above: CacheNode) -> None:
        """Nothing is left of a node: what is cached of its steps ends above."""
        whole = {tree for tree, step in above.marks if self.whole((tree, step))}
        for mark in node.marks:
            self.lose(mark)
            if mark[0] in whole:
                self._vanish(mark)
            else:
                self._where[mark] = above
                above.marks.add(mark)
        node.marks = set()

    def regained(self, tree: str, path: bytes, since: int) -> list[tuple[StepId, bytes]]:
        """Steps that were cut and end on a path that is cached now, after ``since`` tokens of it;
        each with its own path."""
        paths, end = self._paths[tree], len(path) // TOKEN_BYTES
        return [
            (mark, paths[mark])
            for length, marks in self._cut[tree].items()
            if since < length <= end
            for mark in marks
            if path.startswith(paths[mark])
        ]

    def check(self, nodes: Iterable[CacheNode]) -> None:
        """Raise AssertionError unless marks are where they are said to be."""
        assert {m: n for n in nodes for m in n.marks} == self._where, "marks"
        trees = {*self._standing, *self._nameless}
        marked = {(tree, step) for tree in trees for step in self.standing(tree).tolist()}
        assert marked == set(self._where), "marks by search"
        known = {mark for paths in self._paths.values() for mark in paths}
        assert marked <= known, "a mark without a path"
        cut = {m for lengths in self._cut.values() for marks in lengths.values() for m in marks}
        assert known - marked <= cut, "a whole step without a mark"
        assert cut <= known, "a step that is over was cut"

    def _stand(self, mark: StepId) -> None:
        tree, step = mark
        if step < ROOT:
            self._nameless[tree].add(step)
            return
        flags = self._standing[tree]
        if step >= len(flags):
            flags.extend(bytes(max(len(flags), step + 1 - len(flags))))
        flags[step] = 1

    def _vanish(self, mark: StepId) -> None:
        del self._where[mark]
        if mark[1] < ROOT:
            self._nameless[mark[0]].remove(mark[1])
        else:
            self._standing[mark[0]][mark[1]] = 0


def _sets() -> defaultdict[int, set[StepId]]:
    return defaultdict(set)
