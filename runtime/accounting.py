"""What searches are charged: a pass's floating-point operations, and the paths that are alive."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from search.counters import Counters, combined


@dataclass(frozen=True, slots=True)
class Flops:
    """Multiply-adds, counted twice, of a forward pass of one model, by the multiplications for a
    row, for a key that a row attends to, and for a row's logits."""

    row: int
    key: int
    logits: int

    def __call__(self, tokens: int, context_sum: int, logits: int | None = None) -> float:
        """``tokens`` rows, whose contexts (themselves included) sum to ``context_sum``.

        ``logits``: how many of them pass the model's head, all by default.
        """
        head = self.logits * (tokens if logits is None else logits)
        return 2.0 * (self.row * tokens + self.key * context_sum + head)


no_flops = Flops(0, 0, 0)
"""Of a model whose cost is not known."""


def sum_of_contexts(start: int, tokens: int) -> int:
    """The sum of the contexts of ``tokens`` rows at positions from ``start``, each with itself."""
    return tokens * start + tokens * (tokens + 1) // 2


P = TypeVar("P", bound=Hashable)


class LivePaths(Generic[P]):
    """Paths that end at a node its search may come back to; nodes with equal tokens share one."""

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
        dead_paths = []
        for node in nodes:
            path = self._path_of.pop(node, None)
            if path is None:
                continue
            self._nodes[path].discard(node)
            if not self._nodes[path]:
                del self._nodes[path]
                dead_paths.append(path)
        return dead_paths


class TrackedSearch:
    """The live paths and the costs of one search on one model.

    A path is the int64 token ids from the prompt to the end of a step. ``number`` orders searches
    by arrival; ``passes_saved``: by how many forward passes beam extension shortened its rounds.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt: np.ndarray | None = None
        self.counters = Counters()
        self.passes_saved = 0
        self._alive = LivePaths[bytes]()
        self._dead: set[int] = set()

    def name(self, node: int, path: np.ndarray) -> None:
        """The search calls the step at ``path`` by this id. Nodes with equal steps share a path."""
        if node not in self._dead:
            self._alive.add(node, path.tobytes())

    def mark_dead(self, nodes: Sequence[int]) -> bool:
        """These nodes will not be visited again; whether a path died with its last named node."""
        self._dead.update(nodes)
        return bool(self._alive.mark_dead(nodes))

    def count_rehydrated(self, tokens: int) -> None:
        """A sequence starts by computing so many tokens again."""
        self.counters.rehydrated_tokens += tokens
        self.counters.rehydrations += tokens > 0

    def alive(self) -> Iterator[np.ndarray]:
        """The paths of the prompt and of every step that may be visited again."""
        if self.prompt is not None:
            yield self.prompt
        for path in self._alive:
            yield np.frombuffer(path, dtype=np.int64)


def total_of(past: Counters, searches: Mapping[str, TrackedSearch]) -> Counters:
    """What past searches and these have cost together."""
    return combined(Counters, (past, *(search.counters for search in searches.values())))
