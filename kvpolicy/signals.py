"""What is known of each block of a tree, and the score that follows (ArborKV, section 4).

A change touches a few numbers. Scores are made anew for all blocks at once when they are asked for,
in so few calls that it does not matter how many have changed.
"""

from __future__ import annotations

import numpy as np

from kvpolicy.eviction_order import EvictionParams, Ints, static_weight
from kvpolicy.value import Floats, sigmoid

_FIRST = 64
_VALUED, _CONFIDENT, _ATTENDED = 1, 2, 4
_COLUMNS = ["_value", "_confidence", "_mass", "_offset", "_slope", "_depth", "_present", "_scored"]


class Signals:
    """The signals v, u and a of blocks. Row i of every column is block i.

    A score's logit is ``offset + slope * v``: the coefficients of the signals that are there, with
    u and a in the offset.
    """

    def __init__(self, table: Floats, params: EvictionParams) -> None:
        """``table``: ``Theta.table``."""
        self._table: list[list[float]] = table.tolist()
        self._params = params
        self._rows = 0
        self._value, self._confidence, self._mass = np.zeros((3, _FIRST))
        self._offset, self._slope = np.zeros((2, _FIRST))
        self._depth, self._present = np.zeros((2, _FIRST), dtype=np.int64)
        self._scored = np.zeros(_FIRST, dtype=np.bool_)
        self._unvalued: set[int] = set()

    def add(self, node: int, parent: int | None, depth: int, confidence: float | None) -> None:
        """A block, whose value is its parent's until it has one. ``confidence``: its u."""
        self._make_room(node)
        self._depth[node] = depth
        present = 0
        if confidence is not None:
            present, self._confidence[node] = _CONFIDENT, confidence
        if parent is None or parent in self._unvalued:
            self._unvalued.add(node)
        else:
            present |= _VALUED
            self._value[node] = self._value[parent]
        self._update_logit(node, present)

    def set_value(self, node: int, value: float) -> None:
        """A value of its own."""
        self._scored[node] = True
        self._hand_down(node, value)

    def unscored(self, above: int) -> list[int]:
        """The rows after ``above`` that have no value of their own, blocks or not."""
        return (np.flatnonzero(~self._scored[above + 1 : self._rows]) + above + 1).tolist()

    def inherit(self, node: int, giver: int) -> None:
        """A block without a value of its own gets another's."""
        self._hand_down(node, float(self._value[giver]))

    def set_outlook(self, nodes: Ints) -> None:
        """Values of 1, 1/2, 1/3 and so on in this order.

        A step's turn alone counts, not how many come after it: what two searches want equally soon
        is worth the same, however far each of them looks ahead.
        """
        self._value[nodes] = 1.0 / np.arange(1, len(nodes) + 1)
        self._scored[nodes] = True
        for node in self._unvalued.intersection(nodes.tolist()) if self._unvalued else ():
            self._hand_down(node, float(self._value[node]))

    def set_attention(self, node: int, mass: float) -> None:
        """The attention a that a block gets."""
        self._mass[node] = mass
        self._update_logit(node, int(self._present[node]) | _ATTENDED)

    def of(self, nodes: Ints) -> Floats:
        """v, u and a of some blocks, (3, n); NaN where one is missing."""
        known = np.stack([self._value[nodes], self._confidence[nodes], self._mass[nodes]])
        for signal, flag in zip(known, (_VALUED, _CONFIDENT, _ATTENDED), strict=True):
            signal[self._present[nodes] & flag == 0] = np.nan
        return known

    def static_weights(self) -> Floats:
        """s^γ · e^(-λd·d) of each block (rows,)."""
        return self._static_weights(slice(self._rows))

    def static_weight_of(self, node: int) -> float:
        """The same of one block."""
        return float(self._static_weights(slice(node, node + 1))[0])

    def _static_weights(self, rows: slice) -> Floats:
        logits = self._slope[rows] * self._value[rows]
        logits += self._offset[rows]
        return static_weight(sigmoid(logits), self._depth[rows], self._params)

    def _hand_down(self, node: int, value: float) -> None:
        self._unvalued.discard(node)
        self._value[node] = value
        self._update_logit(node, int(self._present[node]) | _VALUED)

    def _update_logit(self, node: int, present: int) -> None:
        """Which signals a block has, or what they are, has changed. A missing one's coefficient
        is 0."""
        bias, slope, confidence, mass = self._table[present]
        offset = bias + confidence * float(self._confidence[node]) + mass * float(self._mass[node])
        self._present[node], self._offset[node], self._slope[node] = present, offset, slope

    def _make_room(self, node: int) -> None:
        """Rows up to ``node``."""
        self._rows = max(self._rows, node + 1)
        room = len(self._value)
        if node < room:
            return
        more = max(room, node + 1 - room)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
