"""Keys and values of every cached token, by slot."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.attention_slice import AttentionSlice
from runtime.embedded.model.config import ModelConfig


class KVStore:
    """Float32 keys and values of ``slots`` tokens for every layer.

    ``keys[layer]`` and ``values[layer]`` are (kv_heads x rows, head_dim) with row
    ``head * rows + slot``, so that a head's keys of a block are gathered as whole rows;
    ``both[layer]`` is the one after the other, so that a token's are written at once. The slot
    ``padding`` = ``slots`` stays zero and fills blocks that end early.
    """

    def __init__(self, config: ModelConfig, slots: int) -> None:
        """``slots``: tokens to hold, at least 1."""
        if slots < 1:
            raise ValueError(f"slots: {slots}; at least 1 is needed")
        self._config = config
        self.kv_heads = config.kv_heads
        self.slots = self.padding = slots
        self.rows = slots + 1
        self.both = [self._empty() for _ in range(config.layers)]
        self.keys, self.values = self._parted()
        self.slice: AttentionSlice | None = None

    def watch(self) -> None:
        """From now on keep what ``attention`` needs; the passes compute what they would."""
        if self.slice is None:
            self.slice = AttentionSlice(self._config, self.rows)

    def attention(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the token in the last of a path's ``slots`` (n,) pays to each of them: (n,).

        Of the slice that is watched, and adding up to 1; the tokens were computed while it was.
        """
        assert self.slice is not None, "nobody watches this store"
        return self.slice.weights(self.keys[self.slice.layer], slots)

    def index(self, slots: Tensor) -> Tensor:
        """Rows of ``slots`` (n,) in ``both``: int64 (n x 2 kv_heads,), heads fastest."""
        heads = torch.arange(2 * self.kv_heads) * self.rows
        return (slots[:, None] + heads).flatten()

    def nbytes(self) -> int:
        """Bytes held, padding included."""
        watched = 0 if self.slice is None else self.slice.nbytes
        return sum(layer.nbytes for layer in self.both) + watched

    def _empty(self) -> Tensor:
        """A layer without tokens. What is written before it is read is not touched here: memory
        that no token has lain in is none of the machine's yet."""
        made = torch.empty(2 * self.kv_heads * self.rows, self._config.head_dim)
        made.view(2 * self.kv_heads, self.rows, -1)[:, self.padding] = 0.0
        return made

    def _parted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer."""
        each = self.kv_heads * self.rows
        return [layer[:each] for layer in self.both], [layer[each:] for layer in self.both]
