"""One search tree as its KV manager sees it: blocks, their signals, and where the search stands.

A block is one node's step; block 0 is the prompt. Ids are the search's own: a parent's id is lower
than its children's, and there may be gaps where a node has no block. Passes over the tree go level
by level in NumPy, so an update is O(n) with few calls.
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
        """``table``: ``Theta.table``; ``prompt_tokens`` is block 0's length."""
        self._table = table
        self._params = params
        self._parent: list[int] = []
        self._live_children: list[int] = []
        self._tokens = np.zeros(_FIRST, dtype=np.int64)
        self._depth = np.zeros(_FIRST, dtype=np.int64)
        self._above = np.zeros(_FIRST, dtype=np.int64)
        """Parents once more, for steps over all blocks at once."""
        self._open_leaf = np.zeros(_FIRST, dtype=np.bool_)
        self._foreseen = np.zeros(_FIRST, dtype=np.bool_)
        self._scored = np.zeros(_FIRST, dtype=np.bool_)
        """Which blocks have a value of their own."""
        self._signals = np.full((len(SIGNALS), _FIRST), np.nan)
        """v, u and a; NaN where one is missing."""
        self._attention: dict[int, tuple[float, int]] = {}
        self._dead: set[int] = set()
        self._active: tuple[int, ...] = ()
        self._weighed: tuple[Floats, Bools] | None = None
        """What ``weights`` returns, until something changes."""
        self._joined: dict[int, float] = {}
        """Weights of blocks that have closed right below Path* since."""
        self.add_block(ROOT, -1, prompt_tokens)

    def __contains__(self, node: int) -> bool:
        return 0 <= node < len(self._parent) and self._parent[node] != _ABSENT

    @property
    def tokens(self) -> Ints:
        """Tokens of each block (rows,); 0 where there is none."""
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
        """The leaves the search stands at."""
        return self._active

    def add_block(
        self, node: int, parent: int, tokens: int, confidence: float | None = None
    ) -> None:
        """A block of ``tokens`` tokens is complete; ``confidence``: its boundary confidence u.

        Until it has a reward it inherits its parent's value. A node that is dead already, or known,
        is left as it is. Raises ValueError if the parent is unknown or the length is not positive.
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
        if self._weighed is not None and self._on_path(parent):
            self._joined[node] = self._weight_below_path(node)
        else:
            self._weighed = None

    def transition(
        self,
        values: Mapping[int, float],
        active: Iterable[int],
        dead: Iterable[int],
        outlook: Sequence[int] = (),
    ) -> None:
        """The search moved on: new rewards, the leaves it expands now, what it will not visit
        again, and in which order it would turn to the others, where it can say.

        Weights follow when they are next asked for.
        """
        self.set_values(values)
        self.set_outlook(outlook)
        self.mark_dead(dead)
        self.set_active(active)

    def set_values(self, values: Mapping[int, float]) -> None:
        """Rewards of some blocks, in [0, 1]; unscored blocks below them inherit. Unknown ids pass.

        Raises ValueError.
        """
        for node, value in values.items():
            if not 0 <= value <= 1:
                raise ValueError(f"value: {value} of node {node}; from 0 to 1 is needed")
            if node not in self:
                continue
            self._signals[_VALUE, node], self._scored[node] = value, True
            self._weighed = None
            if self._live_children[node]:
                self._inherit(node)

    def set_outlook(self, outlook: Sequence[int]) -> None:
        """The search would turn to these in this order: a value is one over its turn.

        This is the value that the search itself goes by (section 4 of the paper); it takes the
        place of a reward, and those that have grown before weigh for themselves again. Unknown ids
        pass.
        """
        rows = np.fromiter(outlook, np.int64, len(outlook))
        if len(rows) and (rows.max() >= len(self._parent) or not self._tokens[rows].all()):
            rows = np.array([node for node in outlook if node in self], dtype=np.int64)
        if len(rows):
            self._foreseen[:] = False
            self._foreseen[rows] = True
            self._scored[rows] = True
            self._signals[_VALUE, rows] = 1.0 / np.arange(1, len(rows) + 1)
            self._weighed = None

    def add_attention(self, node: int, mass: float, queries: int) -> None:
        """``queries`` tokens paid ``mass`` to a block in all, each its ``attention_shares``.

        a is the running mass a query, in [0, 1].
        """
        if node not in self or queries < 1:
            return
        paid, asked = self._attention.get(node, (0.0, 0))
        paid, asked = paid + mass, asked + queries
        self._attention[node] = paid, asked
        self._signals[_ATTENTION, node] = min(1.0, paid / asked)
        if node in self._joined:
            self._joined[node] = self._weight_below_path(node)
        elif not self._on_path(node):
            self._weighed = None

    def set_active(self, active: Iterable[int]) -> None:
        """The search stands at these leaves now; those dead or without a block are left out."""
        self._active = tuple(sorted({node for node in active if self.alive(node)}))
        self._weighed = None

    def mark_dead(self, nodes: Iterable[int]) -> None:
        """These will never be visited again."""
        for node in nodes:
            if node in self._dead:
                continue
            self._dead.add(node)
            if node in self:
                self._open_leaf[node] = self._foreseen[node] = False
                self._weighed = None
                if node != ROOT:
                    self._leave(self._parent[node])

    def signals(self, nodes: Ints) -> Floats:
        """v, u and a of blocks, (3, n); NaN where one is missing."""
        return self._signals[:, nodes]

    def path_and_candidates(self) -> tuple[Ints, Ints]:
        """The blocks on Path*, and those off it from which something may grow, both rising."""
        rows = slice(len(self._parent))
        off = self._open_leaf[rows] | self._foreseen[rows]
        path = np.array(sorted(self._path()), dtype=np.int64)
        off[path] = False
        return path, np.flatnonzero(off)

    def weights(self) -> tuple[Floats, Bools]:
        """Each block's weight and whether it is on Path*, both (rows,); not to be written to.

        A block weighs the most of what may grow at or below it, which is an open leaf or foreseen;
        minus infinity where there is none, infinity where there is no block. Path* is the union of
        the active leaves' ancestor chains, themselves included; what attention it has been paid
        since the last move is not in its own weights, which no order asks for.
        """
        if self._weighed is None or self._joined:
            self._joined.clear()
            weight, on_path = self.own_weights()
            rows = slice(len(weight))
            leafless = np.where(self._tokens[rows] > 0, -np.inf, np.inf)
            weight = np.where(self._open_leaf[rows] | self._foreseen[rows], weight, leafless)
            for below, parents in reversed(self._levels()):
                np.maximum.at(weight, parents, weight[below])
            self._weighed = weight, on_path
        return self._weighed

    def path_and_weight(self, node: int) -> tuple[bool, float]:
        """Whether a block is on Path*, and its weight: for few blocks of many.

        A block that closed below Path* since the last time all were weighed has been weighed by
        itself: those above it are on Path*, whatever they weigh.
        """
        if self._weighed is not None and node in self._joined:
            return False, self._joined[node]
        weight, on_path = self._weighed or self.weights()
        return bool(on_path[node]), float(weight[node])

    def weights_of(self, nodes: Ints) -> Floats:
        """The weights of many (n,), infinite on Path*; a step without a block counts as on its
        path."""
        weight, on_path = self.weights()
        rows = np.clip(nodes, ROOT, len(weight) - 1)
        return np.where((rows == nodes) & ~on_path[rows], weight[rows], np.inf)

    @property
    def weights_current(self) -> bool:
        """Whether nothing has changed since all blocks were weighed, but for new ones below
        Path*."""
        return self._weighed is not None

    def own_weights(self) -> tuple[Floats, Bools]:
        """Equation (2) without α for each block by itself, and Path*, both (rows,), for the
        extractive mode."""
        if self._params.distance_decay:
            distance, on_path = self.distances()
        else:
            distance = np.zeros(1, dtype=np.int64)
            on_path = np.zeros(len(self._parent), dtype=np.bool_)
            on_path[list(self._path())] = True
        static = self._static_weights(slice(len(self._parent)))
        return eviction_weights(static, ~on_path, distance, self._params), on_path

    def distances(self) -> tuple[Ints, Bools]:
        """Edges from each block to the nearest active leaf, and who is on Path*; both (rows,).

        All 0 while there is no active leaf. Two passes over Path*, up and down, give its own
        distances. Below it a block is as far from its anchor, the last one on Path*, as it is
        deeper: Δ minus depth is handed down, and on Path* it is never less than a child's own.
        """
        rows = len(self._parent)
        on_path = np.zeros(rows, dtype=np.bool_)
        if not self._active:
            return np.zeros(rows, dtype=np.int64), on_path
        near = self._near()
        path = np.array(list(near))
        depth = self._depth[:rows]
        beyond = np.full(rows, rows)
        beyond[path] = np.array(list(near.values())) - depth[path]
        on_path[path] = True
        for below, parents in self._levels():
            beyond[below] = np.minimum(beyond[below], beyond[parents])
        return beyond + depth, on_path

    def _levels(self) -> list[tuple[Ints, Ints]]:
        """The blocks of each depth below the prompt and their parents, by rising depth."""
        blocks = np.flatnonzero(self.tokens)[1:]
        by_depth = blocks[np.argsort(self._depth[blocks], kind="stable")]
        ends = np.cumsum(np.bincount(self._depth[blocks])[1:])
        parents = self._above[by_depth]
        return [(by_depth[a:b], parents[a:b]) for a, b in pairwise((0, *ends.tolist()))]

    def _path(self) -> set[int]:
        """Path*."""
        path: set[int] = set()
        for node in self._active:
            while node >= ROOT and node not in path:
                path.add(node)
                node = self._parent[node]
        return path

    def _on_path(self, node: int) -> bool:
        """Whether a block was on Path* when all were last weighed."""
        on_path = () if self._weighed is None else self._weighed[1]
        return node < len(on_path) and bool(on_path[node])

    def _weight_below_path(self, node: int) -> float:
        """The weight of a block that has closed right below Path*."""
        distance = 0
        if self._params.distance_decay:
            distance = self._near()[self._parent[node]] + 1
        static = self._static_weights(slice(node, node + 1))
        off_path, beyond = np.ones(1, dtype=np.bool_), np.full(1, distance)
        return float(eviction_weights(static, off_path, beyond, self._params)[0])

    def _static_weights(self, rows: slice) -> Floats:
        """s^γ · e^(-λd·d) of each block."""
        scores = score(self._table, self._signals[:, rows])
        return static_weight(scores, self._depth[rows], self._params)

    def _near(self) -> dict[int, int]:
        """Distance to the nearest active leaf of every block on Path*."""
        parent = self._parent
        rising = sorted(self._path())
        far = len(rising)
        near = dict.fromkeys(rising, far)
        near.update(dict.fromkeys(self._active, 0))
        for node in reversed(rising[1:]):
            above = parent[node]
            near[above] = min(near[above], near[node] + 1)
        for node in rising[1:]:
            near[node] = min(near[node], near[parent[node]] + 1)
        return near

    def _leave(self, parent: int) -> None:
        """A child of ``parent`` died; without live ones it is an open leaf again."""
        self._live_children[parent] -= 1
        if not self._live_children[parent] and parent not in self._dead:
            self._open_leaf[parent] = True

    def _inherit(self, node: int) -> None:
        """Hand a block's value down to the unscored blocks below it."""
        renewed = {node}
        below = slice(node + 1, len(self._parent))
        for row in (np.flatnonzero(~self._scored[below]) + below.start).tolist():
            if self._parent[row] in renewed:
                renewed.add(row)
                self._signals[_VALUE, row] = self._signals[_VALUE, node]

    def _make_room(self, node: int) -> None:
        """Rows up to ``node``."""
        new = node + 1 - len(self._parent)
        self._parent += [_ABSENT] * new
        self._live_children += [0] * new
        room = len(self._tokens)
        if node < room:
            return
        more = max(room, node + 1 - room)
        for name in ("_tokens", "_depth", "_above", "_open_leaf", "_foreseen", "_scored"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
        missing = np.full((len(SIGNALS), more), np.nan)
        self._signals = np.concatenate([self._signals, missing], axis=1)
