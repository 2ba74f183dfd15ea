"""A hash model that reads paths with holes: its logits follow from the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvpolicy.eviction_order import Ints
from loadtest.token_eviction.path_cache import PartialPath, PathCache
from tests.runtime.hash_model import Letters, _logits, _mix


class HashReader:
    """A fake ``PathReader``; equal to ``tests.runtime.hash_model`` where nothing is missing.

    A key is a hash of the whole path that ends there. A row pays all its attention to the keys
    whose place is a multiple of three, or to all keys where there is none. ``see`` is called after
    a pass with each path's places and the number of rows that were read.
    """

    def __init__(self, see: Callable[[Ints, int], None] = lambda *_: None) -> None:
        self.see = see
        self.text = Letters()
        self.nothing = PartialPath(np.arange(0), torch.empty(1, 2, 1, 0, 1, dtype=torch.int64))

    def read(self, cache: PathCache, tokens: Ints, positions: Ints) -> None:
        """Add to the cache the rows' hashes, each of the key before it, logits and attention."""
        rows = tokens.shape[1]
        layer: Any = cache.layers[0]
        cache.places = np.concatenate([cache.places, positions], 1)
        cache.paid = np.pad(cache.paid, ((0, 0), (0, rows)))
        hashes = np.pad(layer.keys[:, 0, :, 0].numpy().view(np.uint64), ((0, 0), (0, rows)))
        for path, places in enumerate(cache.places):
            for row, (token, at) in enumerate(zip(tokens[path], positions[path], strict=True)):
                before = np.where(places < at, places, -1)
                above = int(hashes[path, before.argmax()]) if before.max() >= 0 else 0
                hashes[path, row - rows] = _mix(above, int(token), int(at))
            there = places <= positions[path, -1]
            heavy = there & (places % 3 == 0) if np.any(places[there] % 3 == 0) else there
            cache.paid[path] += rows * heavy / heavy.sum()
            self.see(places[places < np.iinfo(np.int64).max], rows)
        new = torch.from_numpy(hashes.view(np.int64)[:, None, -rows:, None].copy())
        cache.update(new, new, 0)
        ends = zip(cache.places, positions[:, -1:], hashes, strict=True)
        cache.logits = np.stack([_logits(mine[places <= end]) for places, end, mine in ends])
        cache.read += rows
