"""A forward pass over sequences of which only some tokens have keys and values.

A row attends to the positions that are held, at their own absolute positions, up to itself. Plain
arithmetic, one product over all rows: results depend on the batch by some 1e-7. The weights are the
embedded engine's; its exact pass knows nothing of holes and pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpolicy.eviction_order import Ints
from kvpolicy.value import Floats
from runtime.embedded.model.batch_plan import KVStore
from runtime.embedded.model.config import ModelConfig, middle_layer
from runtime.embedded.model.layers import Layer, Rotation, Weights, normalise, rotate

_HIDDEN = -1e30
_NOWHERE = np.iinfo(np.int64).max
"""The position of keys that only fill up: after every row."""


@dataclass(frozen=True, slots=True)
class SparseInput:
    """Rows of one sequence, and the keys that they may read.

    ``tokens``, ``positions`` and ``writes`` (n,): ids, absolute positions, rising, and the slots
    that take their keys and values. ``keys`` and ``places`` (m,): the slots of all that is held of
    the sequence and their absolute positions, the rows' own among them.
    """

    tokens: Ints
    positions: Ints
    writes: Ints
    keys: Ints
    places: Ints


class SparseOutput(NamedTuple):
    """What a pass found: ``logits`` float32 (readings, vocab) after each one's last row;
    ``masses``: of each reading the attention that its rows paid to each of its keys (m,)."""

    logits: NDArray[np.float32]
    masses: list[Floats]


class SparseForward:
    """A model's weights and its pass. Not thread-safe: one call at a time.

    Attention is measured in one layer, the middle one, as the mean over all of its heads: a row
    pays 1 in all.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Load ``checkpoint`` in float32. Raises UnsupportedModel."""
        self.config = ModelConfig.from_checkpoint(checkpoint)
        with torch.inference_mode():
            self._weights = Weights.load(checkpoint, self.config)
            self._rotation = Rotation(self.config)
        self._slice = middle_layer(self.config.layers) - 1

    def new_store(self, slots: int) -> KVStore:
        """An empty store for ``slots`` tokens of this model."""
        with torch.inference_mode():
            return KVStore(self.config, slots)

    def flops(self, tokens: int, context_sum: int, logits: int) -> float:
        """As ``ModelConfig.flops``."""
        return self.config.flops(tokens, context_sum, logits)

    def run(self, readings: Sequence[SparseInput], store: KVStore) -> SparseOutput:
        """Compute all rows and write their keys and values. What one reading writes, the others
        read, in every layer."""
        with torch.inference_mode():
            plan = _Plan(readings, store, self.config)
            tokens = torch.from_numpy(np.concatenate([r.tokens for r in readings]))
            stream = self._weights.embedding[tokens]
            turn = self._rotation.at(plan.positions)
            masses: list[Floats] = []
            for number, layer in enumerate(self._weights.layers):
                weights = self._attend(layer, number, stream, turn, plan, store)
                if number == self._slice:
                    masses = plan.masses(weights)
                self._transform(layer, stream)
            last = self._normal(stream[plan.last])
            assert self._weights.head is not None, "loaded with its head"
            return SparseOutput(self._weights.head.times(last).numpy(), masses)

    def _attend(
        self,
        layer: Layer,
        number: int,
        stream: Tensor,
        turn: tuple[Tensor, Tensor],
        plan: _Plan,
        store: KVStore,
    ) -> Tensor:
        """Add the layer's attention to ``stream``; its weights (readings, heads, rows, keys)."""
        config, count = self.config, len(stream)
        qkv = layer.qkv.times(self._normal(stream))
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(count, -1, config.head_dim)
        turned = heads[:, : config.heads + config.kv_heads].contiguous()
        if layer.head_norm is not None:
            turned = self._normal(turned) * layer.head_norm
        rotate(turned, *turn, torch.empty_like(turned))
        new = torch.cat([turned[:, config.heads :], heads[:, len(turned[0]) :]], 1)
        store.both[number].index_copy_(0, plan.writes, new.reshape(len(plan.writes), -1))
        query = turned.new_zeros(*plan.shape, config.heads, config.head_dim)
        query[plan.reading, plan.row] = turned[:, : config.heads]
        weights, mixed = plan.attention(query, store.keys[number], store.values[number])
        added = layer.output.times(mixed[plan.reading, plan.row].reshape(count, -1))
        stream += added if layer.output_bias is None else added + layer.output_bias
        return weights

    def _transform(self, layer: Layer, stream: Tensor) -> None:
        normal = self._normal(stream)
        stream += layer.down.times(layer.gate.gate(normal) * layer.up.times(normal))

    def _normal(self, x: Tensor) -> Tensor:
        return normalise(x, self.config.norm_eps, torch.empty_like(x))


class _Plan:
    """Which row stands where and sees which key, once for all layers.

    ``shape``: readings and most rows of one; ``reading`` and ``row`` (rows,): each row's place in
    it.
    """

    def __init__(
        self, readings: Sequence[SparseInput], store: KVStore, config: ModelConfig
    ) -> None:
        sizes = [len(r.tokens) for r in readings]
        self.shape = len(readings), max(sizes)
        self.reading = torch.repeat_interleave(torch.tensor(sizes))
        self.row = torch.cat([torch.arange(size) for size in sizes])
        self.last = torch.tensor(sizes).cumsum(0) - 1
        self.positions = torch.from_numpy(np.concatenate([r.positions for r in readings]))
        slots = torch.from_numpy(np.concatenate([r.writes for r in readings]))
        self.writes = store.index(slots)
        self._sizes = sizes
        self._lengths = [len(r.keys) for r in readings]
        self._group, self._head_dim = config.group, config.head_dim
        longest = max(self._lengths)
        keys = np.full((len(readings), longest), store.padding, dtype=np.int64)
        places = np.full((len(readings), longest), _NOWHERE, dtype=np.int64)
        for at, reading in enumerate(readings):
            keys[at, : len(reading.keys)] = reading.keys
            places[at, : len(reading.places)] = reading.places
        head_rows = torch.arange(store.kv_heads)[:, None] * store.rows
        self._keys = (torch.from_numpy(keys)[:, None] + head_rows).flatten()
        self._hidden = self._hidden_keys(torch.from_numpy(places), config.sliding_window)

    def _hidden_keys(self, places: Tensor, window: int | None) -> Tensor:
        """(readings, 1, 1, rows, keys): whether a row must not see a key."""
        positions = torch.zeros(self.shape, dtype=torch.int64)
        positions[self.reading, self.row] = self.positions
        hidden = places[:, None] > positions[:, :, None]
        if window is not None:
            hidden |= places[:, None] <= positions[:, :, None] - window
        return hidden[:, None, None]

    def attention(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (readings, heads, rows, keys) and what they mix (readings, rows, heads,
        head_dim) for ``query`` of that shape, already scaled."""
        count, rows = self.shape
        own = query.view(count, rows, -1, self._group, self._head_dim)
        shape = count, own.shape[2], -1, self._head_dim
        there, brought = (x[self._keys].view(shape) for x in (keys, values))
        scores = torch.einsum("brkgd,bkld->bkgrl", own, there)
        weights = scores.masked_fill_(self._hidden, _HIDDEN).softmax(-1)
        mixed = torch.einsum("bkgrl,bkld->brkgd", weights, brought)
        return weights.flatten(1, 2), mixed.flatten(2, 3)

    def masses(self, weights: Tensor) -> list[Floats]:
        """What the rows of each reading paid to each key, the mean over heads."""
        mean = weights.double().mean(1).numpy()
        return [
            mean[at, :size, :length].sum(0)
            for at, (size, length) in enumerate(zip(self._sizes, self._lengths, strict=True))
        ]
