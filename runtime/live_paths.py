"""Which token paths of a search are alive: those that a node it may come back to ends at."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class LivePaths(Generic[P]):
    """Nodes by the path that each ends at. Nodes with equal tokens share a path."""

    def __init__(self) -> None:
        self._nodes: dict[P, set[int]] = {}
        self._path_of: dict[int, P] = {}

    def __contains__(self, path: P) -> bool:
        return path in self._nodes

    def __iter__(self) -> Iterator[P]:
        return iter(self._nodes)

    def add(self, node: int, path: P) -> bool:
        """A node ends at this path; whether no other does."""
        first = path not in self._nodes
        self._nodes.setdefault(path, set()).add(node)
        self._path_of[node] = path
        return first

    def mark_dead(self, nodes: Iterable[int]) -> list[P]:
        """The search will not come back to these; the paths that died with their last node."""
        died = []
        for node in nodes:
            path = self._path_of.pop(node, None)
            if path is None:
                continue
            self._nodes[path].discard(node)
            if not self._nodes[path]:
                del self._nodes[path]
                died.append(path)
        return died
