"""What searches cost: floating-point operations of forward passes, and the paths kept alive."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from search.counters import Counters, combined


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one model's forward pass, two per multiplication. ``row``,
    ``key`` and ``logits``: multiplications for a row, a key attended to, and a row's logits."""

    row: int
    key: int
    logits: int

    def __call__(self, tokens: int, context_sum: int, logits: int | None = None) -> float:
        """The cost of ``tokens`` rows whose contexts (themselves included) sum to ``context_sum``.

        ``logits``: how many of the rows pass the model's head, all by default.
        """
        head = self.logits * (tokens if logits is None else logits)
        return 2.0 * (self.row * tokens + self.key * context_sum + head)


no_flops = Flops(0, 0, 0)
"""For a model whose cost is not known: zero."""


def sum_of_contexts(start: int, tokens: int) -> int:
    """The sum of the contexts, each with its row, of ``tokens`` rows from position ``start``."""
    return tokens * start + tokens * (tokens + 1) // 2


P = TypeVar("P", bound=Hashable)


class LivePaths(Generic[P]):
    """Paths to the nodes that a search may return to; nodes with equal tokens share a path."""

    def __init__(self) -> None:
        self._nodes: dict[P, set[int]] = {}
        self._path_of: dict[int, P] = {}

    def __contains__(self, path: P) -> bool:
        return path in self._nodes

    def __iter__(self) -> Iterator[P]:
        return iter(self._nodes)

    def add(self, node: int, path: P) -> bool:
        """Record that a node ends at this path; returns whether it is the first one there."""
        first = path not in self._nodes
        self._nodes.setdefault(path, set()).add(node)
        self._path_of[node] = path
        return first

    def mark_dead(self, nodes: Iterable[int]) -> list[P]:
        """Drop nodes that the search will not return to; returns the paths left without a node."""
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
        """Record the node whose step ends at ``path``. Nodes with equal steps share a path."""
        if node not in self._dead:
            self._alive.add(node, path.tobytes())

    def mark_dead(self, nodes: Sequence[int]) -> bool:
        """Drop nodes that will not be visited again; returns whether a path lost its last node."""
        self._dead.update(nodes)
        return bool(self._alive.mark_dead(nodes))

    def count_rehydrated(self, tokens: int) -> None:
        """Count a sequence that starts by recomputing ``tokens`` tokens."""
        self.counters.rehydrated_tokens += tokens
        self.counters.rehydrations += tokens > 0

    def alive(self) -> Iterator[np.ndarray]:
        """The paths of the prompt and of every step that may be visited again."""
        if self.prompt is not None:
            yield self.prompt
        for path in self._alive:
            yield np.frombuffer(path, dtype=np.int64)


def total_of(past: Counters, searches: Mapping[str, TrackedSearch]) -> Counters:
    """The costs of past searches and of ``searches``, added up."""
    return combined(Counters, (past, *(search.counters for search in searches.values())))
