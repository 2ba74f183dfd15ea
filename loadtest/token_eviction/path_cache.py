"""transformers' models and cache, reading paths of which only some tokens are held.

A row attends to the positions that are held, at their own absolute positions, up to itself. Keys
are cached as they were rotated, so gathering rows is all that eviction takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache

from kvpolicy.eviction_order import Ints
from runtime.embedded.model.config import ModelConfig, middle_layer
from runtime.text import Text

_NOWHERE = np.iinfo(np.int64).max
"""The position of padding keys: after every row."""
_HIDDEN = torch.finfo(torch.float32).min


class PartialPath(NamedTuple):
    """What is held of a path: absolute positions (n,), rising, and their keys and values (layers,
    2, heads, n, head_dim)."""

    places: Ints
    kv: Tensor


class PathCache(DynamicCache):
    """What is held of some paths, side by side; shorter ones are padded in front.

    ``places`` (paths, keys): the absolute position of each key; ``paid`` (paths, keys): the
    attention that rows read since have paid to it. ``read``: how many rows each path has read;
    ``logits`` (paths, vocab) follow the last one.
    """

    def __init__(self, paths: Sequence[PartialPath]) -> None:
        longest = max(len(path.places) for path in paths)
        gaps = [(longest - len(path.places), path) for path in paths]
        filled = [np.pad(path.places, (gap, 0), constant_values=_NOWHERE) for gap, path in gaps]
        self.places = np.stack(filled)
        self.paid = np.zeros(self.places.shape)
        self.read = 0
        self.logits = np.empty((len(paths), 0), dtype=np.float32)
        kv = torch.stack([pad(path.kv, (0, 0, gap, 0)) for gap, path in gaps], 2)
        super().__init__([(keys, values) for keys, values in kv])

    def kv_read(self, path: int) -> Tensor:
        """Keys and values (layers, 2, heads, read, head_dim) of the rows that a path has read."""
        index = path, slice(None), slice(-self.read, None)
        layers = [(keys[index], values[index]) for keys, values, _ in self]  # type: ignore[index]
        return torch.stack([torch.stack(both) for both in layers])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these paths."""
        super().batch_select_indices(indices)
        rows = indices.numpy()
        self.places, self.paid = self.places[rows], self.paid[rows]
        self.logits = self.logits[rows]


class PathReader:
    """A policy model that reads paths with holes, loaded once for any number of trees.

    Attention is measured in one layer, the middle one, as the mean over all of its heads: a row
    pays 1 in all. ``nothing`` is a path of which nothing is held.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Load ``checkpoint`` in float32. Raises ValueError for one that cannot be used."""
        self.text = Text(checkpoint)
        config = ModelConfig.from_checkpoint(checkpoint)
        empty = torch.empty(config.layers, 2, config.kv_heads, 0, config.head_dim)
        self.nothing = PartialPath(np.arange(0), empty)
        self._window = config.sliding_window or _NOWHERE
        self._slice = middle_layer(config.layers) - 1
        self._model = AutoModelForCausalLM.from_pretrained(
            str(checkpoint),
            dtype=torch.float32,
            attn_implementation="eager",  # the only one that returns attention weights
            local_files_only=True,
            use_safetensors=True,
        ).eval()

    @torch.inference_mode()
    def read(self, cache: PathCache, tokens: Ints, positions: Ints) -> None:
        """Add rows to every path of ``cache``.

        ``tokens`` and ``positions`` (paths, rows): ids and absolute positions, rising.
        """
        rows = positions.shape[1]
        cache.places = np.concatenate([cache.places, positions], 1)
        keys, at = cache.places[:, None], positions[:, :, None]
        hidden = torch.from_numpy((keys > at) | (keys <= at - self._window))
        out = self._model(
            input_ids=torch.from_numpy(tokens),
            position_ids=torch.from_numpy(positions),
            attention_mask=torch.zeros(hidden.shape).masked_fill(hidden, _HIDDEN)[:, None],
            past_key_values=cache,
            output_attentions=True,
            logits_to_keep=1,
        )
        paid = out.attentions[self._slice].double().mean(1).sum(1).numpy()
        cache.paid = np.pad(cache.paid, ((0, 0), (0, rows))) + paid
        cache.logits, cache.read = out.logits[:, -1].numpy(), cache.read + rows
