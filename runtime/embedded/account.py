"""What one model knows of a search in flight: which token paths are alive, and what it has cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class Account:
    """The paths and costs of one search on one model.

    A path is the int64 token ids from the prompt to the end of a step.
    ``number`` orders searches by arrival, ``passes`` counts the forward passes it had rows in,
    ``peak`` is the most unique tokens held for it at once.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt: np.ndarray | None = None
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.passes = 0
        self.flops = 0.0
        self.peak = 0
        self._alive: dict[bytes, set[int]] = {}
        self._path_of: dict[int, bytes] = {}
        self._dead: set[int] = set()

    def name(self, node: int, path: np.ndarray) -> None:
        """The search calls the step at ``path`` by this id. Nodes drawn alike share a path."""
        if node not in self._dead:
            self._path_of[node] = path.tobytes()
            self._alive.setdefault(path.tobytes(), set()).add(node)

    def bury(self, nodes: Iterable[int]) -> bool:
        """These nodes will not be visited again; whether a path died with its last named node."""
        changed = False
        for node in nodes:
            self._dead.add(node)
            path = self._path_of.pop(node, None)
            if path is None:
                continue
            self._alive[path].discard(node)
            if not self._alive[path]:
                del self._alive[path]
                changed = True
        return changed

    def charge(self, other: Account) -> None:
        """Add another search's costs to this one's."""
        self.decoded_tokens += other.decoded_tokens
        self.prefilled_tokens += other.prefilled_tokens
        self.cached_tokens += other.cached_tokens
        self.passes += other.passes
        self.flops += other.flops

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model: prefilled and decoded."""
        return self.prefilled_tokens + self.decoded_tokens

    def alive(self) -> Iterator[np.ndarray]:
        """The paths of the prompt and of every step that may be visited again."""
        if self.prompt is not None:
            yield self.prompt
        for path in self._alive:
            yield np.frombuffer(path, dtype=np.int64)
