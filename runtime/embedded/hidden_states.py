"""Vectors from the policy model's own hidden states: each step read alone, from position 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.embedded.branch_validation import must_be_ids
from runtime.embedded.model.batch_plan import KVStore, Span
from runtime.embedded.model.config import middle_layer
from runtime.embedded.model.forward import Forward
from search.engine import EngineError


class HiddenStates:
    """The mean over a step's tokens of the normalised residual stream after one layer.

    A KV store of its own, so that nothing of a search is touched. In exact mode a step's bits do
    not depend on the steps read beside it.
    """

    def __init__(self, forward: Forward, layer: int | None = None) -> None:
        """``layer``: read after so many layers, by default half of them."""
        self._forward = forward
        self._config = forward.config
        self.layer = middle_layer(self._config.layers) if layer is None else layer
        if not 1 <= self.layer <= self._config.layers:
            allowed = f"1 to {self._config.layers} are allowed"
            raise ValueError(f"embedder_layer: {self.layer}; {allowed} with this policy model")
        self._store: KVStore | None = None
        self._slots = 0

    def embed_steps(self, steps: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """A vector (hidden,) a step. Raises EngineError for ids that the model does not have."""
        for step in steps:
            must_be_ids("steps", step, self._config.vocab)
            if len(step) > self._config.context:
                allowed = f"the context is {self._config.context}"
                raise EngineError(f"steps: one of {len(step)} tokens; {allowed}")
        ends = np.cumsum([len(step) for step in steps])
        store = self._room(int(ends[-1]))
        spans = [
            Span(np.asarray(step, dtype=np.int64), 0, np.arange(end - len(step), end), 0)
            for step, end in zip(steps, ends.tolist(), strict=True)
        ]
        states = self._forward.states(spans, store, self.layer).numpy().astype(np.float64)
        parts = np.split(states, ends[:-1])
        return [tuple((part.sum(axis=0) / len(part)).tolist()) for part in parts]

    def flops(self, steps: Sequence[Sequence[int]]) -> float:
        """What reading the steps costs: the layers up to the one read, no head."""
        tokens = sum(len(step) for step in steps)
        contexts = sum(len(step) * (len(step) + 1) // 2 for step in steps)
        return replace(self._config, layers=self.layer).flops(tokens, contexts, 0)

    def _room(self, slots: int) -> KVStore:
        if self._store is None or self._slots < slots:
            self._store, self._slots = self._forward.new_store(slots), slots
        return self._store
