"""A hash model that reads with holes: logits follow from what is read, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadtest.token_eviction.sparse_forward import SparseInput, SparseOutput
from tests.runtime.hash_model import HashModel, _logits, _mix


class HashReader:
    """Stands in for ``SparseForward``; ``tests.runtime.hash_model`` where nothing is missing.

    A row pays all its attention to the keys whose place is a multiple of three, or to itself where
    there is none. ``see`` hears every reading before it is run.
    """

    def __init__(self, see: Callable[[SparseInput], None] = lambda _: None) -> None:
        self.see = see
        self.flops = HashModel.flops

    def new_store(self, slots: int) -> np.ndarray:
        """A hash a slot."""
        return np.zeros(slots, dtype=np.uint64)

    def run(self, readings: Sequence[SparseInput], store: np.ndarray) -> SparseOutput:
        """Write the rows' hashes, each after the last key before it; logits, attention."""
        logits, masses = [], []
        for reading in readings:
            self.see(reading)
            for token, at, slot in zip(
                reading.tokens.tolist(), reading.positions.tolist(), reading.writes, strict=True
            ):
                before = reading.keys[reading.places < at]
                above = int(store[before[-1]]) if len(before) else 0
                store[slot] = _mix(above, token, at)
            end = reading.positions[-1]
            logits.append(_logits(store[reading.keys[reading.places <= end]]))
            heavy = (reading.places % 3 == 0) & (reading.places <= end)
            heavy = heavy if heavy.any() else reading.places == end
            masses.append(len(reading.tokens) * heavy / heavy.sum())
        return SparseOutput(np.stack(logits), masses)
