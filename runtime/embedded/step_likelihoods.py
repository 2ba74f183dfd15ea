"""How likely the steps of searches were when they were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class StepLikelihoods:
    """Mean log-probabilities of drawn steps, by search and token path (int64 ids)."""

    def __init__(self) -> None:
        self._known: dict[str, dict[bytes, tuple[float, int]]] = {}

    def note(self, tree: str, path: np.ndarray, mean: float, tokens: int) -> None:
        """The last ``tokens`` of ``path`` are a step with this mean."""
        self._known.setdefault(tree, {})[path.tobytes()] = mean, tokens

    def mean(self, tree: str, prompt: np.ndarray, steps: Sequence[Sequence[int]]) -> float:
        """Mean log-probability a token of all ``steps``. Raises KeyError for unknown ones."""
        known, path = self._known[tree], prompt
        total, tokens = 0.0, 0
        for step in steps:
            path = np.concatenate([path, np.asarray(step, dtype=np.int64)])
            mean, count = known[path.tobytes()]
            total, tokens = total + mean * count, tokens + count
        return total / tokens

    def forget(self, tree: str) -> None:
        """The search is over."""
        self._known.pop(tree, None)
