"""One search tree as its KV manager sees it: blocks, their signals, and where the search stands.

A block is one node's step; block 0 is the prompt. Ids are the search's node ids: a parent's id is
lower than its children's, and an id without a block leaves a gap. Passes over the tree go level by
level in NumPy, so an update is O(n) with few calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from kvpolicy.eviction_order import (
    Bools,
    EvictionParams,
    Ints,
    eviction_weights,
    static_weight,
)
from kvpolicy.value import SIGNALS, Floats, score

ROOT = 0
_ABSENT = -2
_FIRST = 64
_VALUE, _CONFIDENCE, _ATTENTION = range(len(SIGNALS))


class TreeBlocks:
    """The blocks of one tree. Row i of every array is block i."""

    def __init__(self, prompt_tokens: int, table: Floats, params: EvictionParams) -> None:
        """``table``: as from ``Theta.table``; ``prompt_tokens``: block 0's length."""
        self._table = table
        self._params = params
        self._parent: list[int] = []
        self._live_children: list[int] = []
        self._tokens = np.zeros(_FIRST, dtype=np.int64)
        self._depth = np.zeros(_FIRST, dtype=np.int64)
        self._above = np.zeros(_FIRST, dtype=np.int64)
        """The parents again, as an array for operations over all blocks at once."""
        self._open_leaf = np.zeros(_FIRST, dtype=np.bool_)
        self._in_outlook = np.zeros(_FIRST, dtype=np.bool_)
        self._scored = np.zeros(_FIRST, dtype=np.bool_)
        """Which blocks have a value of their own."""
        self._signals = np.full((len(SIGNALS), _FIRST), np.nan)
        """v, u and a; NaN where one is missing."""
        self._attention: dict[int, tuple[float, int]] = {}
        self._dead: set[int] = set()
        self._active: tuple[int, ...] = ()
        self._all_weights: tuple[Floats, Bools] | None = None
        """The cached result of ``weights``; None once something has changed."""
        self._new_weights: dict[int, float] = {}
        """Weights of blocks that have closed right below Path* since ``_all_weights`` was made."""
        self.add_block(ROOT, -1, prompt_tokens)

    def __contains__(self, node: int) -> bool:
        return 0 <= node < len(self._parent) and self._parent[node] != _ABSENT

    @property
    def tokens(self) -> Ints:
        """Tokens of each block (rows,); 0 where there is no block."""
        return self._tokens[: len(self._parent)]

    def alive(self, node: int) -> bool:
        """Whether a block may be visited again."""
        return node in self and node not in self._dead

    def chain(self, node: int) -> list[int]:
        """The blocks from the prompt's down to this one."""
        chain = []
        while node >= ROOT:
            chain.append(node)
            node = self._parent[node]
        return chain[::-1]

    def end_position(self, node: int) -> int:
        """Tokens from the prompt's start to the block's end."""
        return sum(int(self._tokens[block]) for block in self.chain(node))

    @property
    def active(self) -> tuple[int, ...]:
        """The leaves that the search expands now."""
        return self._active

    def add_block(
        self, node: int, parent: int, tokens: int, confidence: float | None = None
    ) -> None:
        """Add a complete block of ``tokens`` tokens; ``confidence``: its boundary confidence u.

        Until it has a reward it inherits its parent's value. Nothing happens for a node that is
        dead or has a block already. Raises ValueError for a parent that is unknown or has no lower
        id, and for a length that is not positive.
        """
        if node in self or node in self._dead:
            return
        if parent not in self and node != ROOT:
            raise ValueError(f"parent: {parent} of node {node} has no block")
        if not parent < node:
            raise ValueError(f"node: {node}; an id above its parent's {parent} is needed")
        if tokens < 1:
            raise ValueError(f"tokens: {tokens} of node {node}; at least 1 is needed")
        self._make_room(node)
        depth = 0 if node == ROOT else int(self._depth[parent]) + 1
        self._parent[node] = parent
        self._tokens[node], self._depth[node], self._above[node] = tokens, depth, parent
        self._open_leaf[node] = True
        if node != ROOT:
            self._live_children[parent] += 1
            self._open_leaf[parent] = False
            self._signals[_VALUE, node] = self._signals[_VALUE, parent]
        if confidence is not None:
            self._signals[_CONFIDENCE, node] = confidence
        if self._all_weights is not None and self._on_path(parent):
            self._new_weights[node] = self._weight_below_path(node)
        else:
            self._all_weights = None

    def transition(
        self,
        values: Mapping[int, float],
        active: Iterable[int],
        dead: Iterable[int],
        outlook: Sequence[int] = (),
    ) -> None:
        """Take a move of the search: new rewards, the leaves that it expands now, the nodes that it
        will not visit again, and the order in which it would turn to the others, if it knows.

        Weights are computed when they are next asked for.
        """
        self.set_values(values)
        self.set_outlook(outlook)
        self.mark_dead(dead)
        self.set_active(active)

    def set_values(self, values: Mapping[int, float]) -> None:
        """Set rewards of blocks, in [0, 1]; unscored blocks below inherit them. Ids without a block
        are ignored. Raises ValueError.
        """
        for node, value in values.items():
            if not 0 <= value <= 1:
                raise ValueError(f"value: {value} of node {node}; from 0 to 1 is needed")
            if node not in self:
                continue
            self._signals[_VALUE, node], self._scored[node] = value, True
            self._all_weights = None
            if self._live_children[node]:
                self._pass_value_down(node)

    def set_outlook(self, outlook: Sequence[int]) -> None:
        """Set the nodes that the search would turn to next, in order: the n-th gets the value 1/n.

        This is the value that the search itself goes by (section 4 of the paper), so it replaces
        rewards; also blocks with children count as candidates then. An empty outlook changes
        nothing; ids without a block are ignored.
        """
        rows = np.fromiter(outlook, np.int64, len(outlook))
        if len(rows) and (rows.max() >= len(self._parent) or not self._tokens[rows].all()):
            rows = np.array([node for node in outlook if node in self], dtype=np.int64)
        if len(rows):
            self._in_outlook[:] = False
            self._in_outlook[rows] = True
            self._scored[rows] = True
            self._signals[_VALUE, rows] = 1.0 / np.arange(1, len(rows) + 1)
            self._all_weights = None

    def add_attention(self, node: int, mass: float, queries: int) -> None:
        """Add the attention of ``queries`` tokens to a block: ``mass``, the sum of their shares by
        ``attention_shares``. The signal a is the running mean per query, in [0, 1].
        """
        if node not in self or queries < 1:
            return
        total, count = self._attention.get(node, (0.0, 0))
        total, count = total + mass, count + queries
        self._attention[node] = total, count
        self._signals[_ATTENTION, node] = min(1.0, total / count)
        if node in self._new_weights:
            self._new_weights[node] = self._weight_below_path(node)
        elif not self._on_path(node):
            self._all_weights = None

    def set_active(self, active: Iterable[int]) -> None:
        """Set the leaves that the search expands now; dead ones and those without a block are
        ignored."""
        self._active = tuple(sorted({node for node in active if self.alive(node)}))
        self._all_weights = None

    def mark_dead(self, nodes: Iterable[int]) -> None:
        """Mark nodes that will never be visited again."""
        for node in nodes:
            if node in self._dead:
                continue
            self._dead.add(node)
            if node in self:
                self._open_leaf[node] = self._in_outlook[node] = False
                self._all_weights = None
                if node != ROOT:
                    self._remove_live_child(self._parent[node])

    def signals(self, nodes: Ints) -> Floats:
        """The signals v, u and a of ``nodes``, (3, n); NaN where one is missing."""
        return self._signals[:, nodes]

    def path_and_candidates(self) -> tuple[Ints, Ints]:
        """The blocks on Path*, and those off it from which something may grow, both ascending."""
        rows = slice(len(self._parent))
        off = self._open_leaf[rows] | self._in_outlook[rows]
        path = np.array(sorted(self._path()), dtype=np.int64)
        off[path] = False
        return path, np.flatnonzero(off)

    def weights(self) -> tuple[Floats, Bools]:
        """Each block's weight and whether it is on Path*, both (rows,), read-only.

        A block's weight is the largest own weight among the open leaves and outlook nodes at or
        below it: minus infinity if there are none, infinity where there is no block. Path* is the
        union of the active leaves' ancestor chains, leaves included. Attention paid to blocks on
        Path* since the last move is not in their weights yet: no eviction order reads those.
        """
        if self._all_weights is None or self._new_weights:
            self._new_weights.clear()
            weight, on_path = self.own_weights()
            rows = slice(len(weight))
            leafless = np.where(self._tokens[rows] > 0, -np.inf, np.inf)
            weight = np.where(self._open_leaf[rows] | self._in_outlook[rows], weight, leafless)
            for below, parents in reversed(self._levels()):
                np.maximum.at(weight, parents, weight[below])
            self._all_weights = weight, on_path
        return self._all_weights

    def path_and_weight(self, node: int) -> tuple[bool, float]:
        """Whether a block is on Path*, and its weight; cheap for a few blocks of many.

        A block that closed right below Path* since all were weighed has been weighed by itself:
        everything above it is on Path*, where weights do not matter.
        """
        if self._all_weights is not None and node in self._new_weights:
            return False, self._new_weights[node]
        weight, on_path = self._all_weights or self.weights()
        return bool(on_path[node]), float(weight[node])

    def weights_of(self, nodes: Ints) -> Floats:
        """The weights of ``nodes`` (n,), infinite on Path*; a node without a block counts as on
        Path*."""
        weight, on_path = self.weights()
        rows = np.clip(nodes, ROOT, len(weight) - 1)
        return np.where((rows == nodes) & ~on_path[rows], weight[rows], np.inf)

    @property
    def weights_current(self) -> bool:
        """Whether all weights are cached; blocks that were added right below Path* since then have
        theirs as well."""
        return self._all_weights is not None

    def own_weights(self) -> tuple[Floats, Bools]:
        """Equation (2) without α for each block by itself, and whether it is on Path*, both
        (rows,). The extractive mode reads these, too."""
        if self._params.distance_decay:
            distance, on_path = self.distances()
        else:
            distance = np.zeros(1, dtype=np.int64)
            on_path = np.zeros(len(self._parent), dtype=np.bool_)
            on_path[list(self._path())] = True
        static = self._static_weights(slice(len(self._parent)))
        return eviction_weights(static, ~on_path, distance, self._params), on_path

    def distances(self) -> tuple[Ints, Bools]:
        """Edges from each block to the nearest active leaf, and whether it is on Path*, both
        (rows,); all 0 and False while there is no active leaf.

        Two passes over Path*, up and down, give the distances on it. Below Path* a block is as far
        from its last ancestor on it as it is deeper, so Δ minus depth is passed down, which changes
        nothing on Path*.
        """
        rows = len(self._parent)
        on_path = np.zeros(rows, dtype=np.bool_)
        if not self._active:
            return np.zeros(rows, dtype=np.int64), on_path
        path_distances = self._path_distances()
        path = np.array(list(path_distances))
        depth = self._depth[:rows]
        offset = np.full(rows, rows)
        offset[path] = np.array(list(path_distances.values())) - depth[path]
        on_path[path] = True
        for below, parents in self._levels():
            offset[below] = np.minimum(offset[below], offset[parents])
        return offset + depth, on_path

    def _levels(self) -> list[tuple[Ints, Ints]]:
        """The blocks of each depth below the prompt and their parents, by ascending depth."""
        blocks = np.flatnonzero(self.tokens)[1:]
        by_depth = blocks[np.argsort(self._depth[blocks], kind="stable")]
        ends = np.cumsum(np.bincount(self._depth[blocks])[1:])
        parents = self._above[by_depth]
        return [(by_depth[a:b], parents[a:b]) for a, b in pairwise((0, *ends.tolist()))]

    def _path(self) -> set[int]:
        """The blocks on Path*: the active leaves and their ancestors."""
        path: set[int] = set()
        for node in self._active:
            while node >= ROOT and node not in path:
                path.add(node)
                node = self._parent[node]
        return path

    def _on_path(self, node: int) -> bool:
        """Whether a block was on Path* when all were last weighed."""
        on_path = () if self._all_weights is None else self._all_weights[1]
        return node < len(on_path) and bool(on_path[node])

    def _weight_below_path(self, node: int) -> float:
        """The weight of a block right below Path*."""
        distance = 0
        if self._params.distance_decay:
            distance = self._path_distances()[self._parent[node]] + 1
        static = self._static_weights(slice(node, node + 1))
        off_path, distances = np.ones(1, dtype=np.bool_), np.full(1, distance)
        return float(eviction_weights(static, off_path, distances, self._params)[0])

    def _static_weights(self, rows: slice) -> Floats:
        """s^γ · e^(-λd·d) of each block in ``rows``."""
        scores = score(self._table, self._signals[:, rows])
        return static_weight(scores, self._depth[rows], self._params)

    def _path_distances(self) -> dict[int, int]:
        """Each block on Path* with its distance to the nearest active leaf."""
        parent = self._parent
        rising = sorted(self._path())
        far = len(rising)
        distances = dict.fromkeys(rising, far)
        distances.update(dict.fromkeys(self._active, 0))
        for node in reversed(rising[1:]):
            above = parent[node]
            distances[above] = min(distances[above], distances[node] + 1)
        for node in rising[1:]:
            distances[node] = min(distances[node], distances[parent[node]] + 1)
        return distances

    def _remove_live_child(self, parent: int) -> None:
        """Count a dead child of ``parent``, which is an open leaf again if no live one remains."""
        self._live_children[parent] -= 1
        if not self._live_children[parent] and parent not in self._dead:
            self._open_leaf[parent] = True

    def _pass_value_down(self, node: int) -> None:
        """Copy a block's value to the unscored blocks below it."""
        updated = {node}
        below = slice(node + 1, len(self._parent))
        for row in (np.flatnonzero(~self._scored[below]) + below.start).tolist():
            if self._parent[row] in updated:
                updated.add(row)
                self._signals[_VALUE, row] = self._signals[_VALUE, node]

    def _make_room(self, node: int) -> None:
        """Grow the arrays so that they have a row for ``node``."""
        rows = node + 1 - len(self._parent)
        self._parent += [_ABSENT] * rows
        self._live_children += [0] * rows
        room = len(self._tokens)
        if node < room:
            return
        growth = max(room, node + 1 - room)
        for name in ("_tokens", "_depth", "_above", "_open_leaf", "_in_outlook", "_scored"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(growth, dtype=column.dtype)]))
        missing = np.full((len(SIGNALS), growth), np.nan)
        self._signals = np.concatenate([self._signals, missing], axis=1)
