"""The free slots of a KV store: a slot holds keys and values of one token."""

from __future__ import annotations

import numpy as np


class KvPool:
    """A stack of free slot numbers in [0, capacity)."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity}; at least 1 slot is needed")
        self.capacity = capacity
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._count = capacity

    @property
    def available(self) -> int:
        """Slots nobody uses."""
        return self._count

    def allocate(self, count: int) -> np.ndarray:
        """``count`` slots, int64 (count,); the caller has seen that they are there."""
        assert count <= self._count, "more slots taken than free"
        self._count -= count
        return self._stack[self._count : self._count + count][::-1].copy()

    def free(self, slots: np.ndarray) -> None:
        """Return slots."""
        assert self._count + len(slots) <= self.capacity, "a slot was returned twice"
        self._stack[self._count : self._count + len(slots)] = slots
        self._count += len(slots)

    def free_slots(self) -> np.ndarray:
        """The free slots themselves, for checks."""
        return self._stack[: self._count].copy()
