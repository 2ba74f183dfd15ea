"""The thin slice of attention that says what later tokens pay to a block (ArborKV, section 4, a).

One layer, the middle one, where attention goes by what is said more than by how near it is; of it
the first key head with the query heads that share it, whose weights are averaged. Its keys are
cached anyway. Its queries are kept beside them, a copy of what a pass has computed: nothing goes
back, so no bit of the model's output can depend on it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.config import ModelConfig, middle_layer


class AttentionSlice:
    """The queries of the slice, by slot, and the weights that follow from them."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        """``rows``: slots of the store, its padding included."""
        self.layer = middle_layer(config.layers) - 1
        self._heads = config.group
        self._window = config.sliding_window
        self._queries = torch.empty(rows, config.group * config.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the queries."""
        return self._queries.nbytes

    def note(self, slots: Tensor, query: Tensor) -> None:
        """Keep the layer's ``query`` (n, heads, head_dim), scaled, of tokens at ``slots`` (n,)."""
        self._queries.index_copy_(0, slots, query[:, : self._heads].flatten(1))

    def weights(self, keys: Tensor, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The softmax (n,) of the last token's query over the keys of its path, heads averaged.

        ``keys``: the layer's, as in ``KVStore``; beyond a sliding window they get 0.
        """
        since = 0 if self._window is None else max(0, len(slots) - self._window)
        seen = keys.numpy()[slots[since:]]
        scores = seen @ self._queries.numpy()[slots[-1]].reshape(self._heads, -1).T
        weights = np.exp(scores - scores.max(0), dtype=np.float64)
        weights /= weights.sum(0)
        found = np.zeros(len(slots))
        found[since:] = weights.mean(1)
        return found
