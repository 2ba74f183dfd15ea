"""Attention in fixed pieces: (query tile) x (key block of 32), merged in block order.

softmax(q K / sqrt(d)) V of one row is sum_b e^(q K_b - m) V_b over sum_b e^(q K_b - m), with m the
exact maximum over all its keys, each block's two products in a tile of fixed size and the sums over
blocks taken in rising order. So a row's bits follow from its own query, keys and position alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.embedded.kernels import Workspace
from runtime.embedded.plan import BLOCK, Plan, Strip

_GATHER_BYTES = 1 << 21  # keys gathered at once stay in the second-level cache
_HIDDEN = -1e30


class _Piece(NamedTuple):
    """A run of (tile, head) pairs of a strip whose gathered keys stay in the cache.

    ``rows``: their store rows; ``gathered`` (pairs x BLOCK, head_dim) and ``block`` (pairs, BLOCK,
    head_dim): where these go; ``query`` (pairs, n, head_dim), ``scores`` (pairs, n, BLOCK) and
    ``mixed`` (pairs, n, head_dim): the operands, n = rows of a tile x group.
    """

    rows: Tensor
    gathered: Tensor
    block: Tensor
    block_t: Tensor
    query: Tensor
    scores: Tensor
    mixed: Tensor


class _Veil(NamedTuple):
    """The part of the scores in which keys are hidden, and two arrays of its shape:
    ``ceiling`` is -1e30 and ``seen`` 0 where a key is hidden, else infinite and 1."""

    scores: Tensor
    ceiling: Tensor
    seen: Tensor


class Attention:
    """The attention of one call. Buffers and their views are made once and serve every layer."""

    def __init__(
        self, plan: Plan, *, kv_heads: int, group: int, head_dim: int, space: Workspace
    ) -> None:
        """``group``: query heads of a key/value head."""
        rows, width = len(plan.rows.tokens), kv_heads * group
        self._plan = plan
        self._query = space.take("query_tiles", plan.places, group * head_dim)
        self._scores = space.take("scores", plan.places, group, BLOCK)
        self._mixed = space.take("mixed", plan.places, group * head_dim)
        self._pieces = [p for s in plan.strips for p in self._cut(s, kv_heads, head_dim, space)]
        self._veils = [_veil(s, self._scores, kv_heads) for s in plan.strips if len(s.mask)]
        items = len(plan.items)
        self._by_place = space.take("by_place", plan.places, group)
        self._by_item = space.take("by_item", items, group)
        self._mixed_by_item = space.take("mixed_by_item", items, group * head_dim)
        self._steps = _columns(self._by_item.view(-1, width), plan)
        self._mixed_steps = _columns(self._mixed_by_item.view(-1, width * head_dim), plan)
        self._by_row = self._by_item[: rows * kv_heads]
        self._top = space.take("top", plan.places, group)
        self._total = self._mixed_by_item[: rows * kv_heads].view(rows, width, head_dim)
        self._weight = self._by_row.view(rows, width, 1)

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Fill ``out`` (rows, heads, head_dim) in the plan's row order.

        ``query`` (rows, heads, head_dim), contiguous and already scaled by 1 / sqrt(head_dim);
        ``keys`` and ``values`` of one layer as in ``KVStore``.
        """
        plan, scores = self._plan, self._scores
        torch.index_select(query.view(-1, self._query.shape[1]), 0, plan.query, out=self._query)
        for piece in self._pieces:
            torch.index_select(keys, 0, piece.rows, out=piece.gathered)
            torch.bmm(piece.query, piece.block_t, out=piece.scores)
        self._weigh()
        for piece in self._pieces:
            torch.index_select(values, 0, piece.rows, out=piece.gathered)
            torch.bmm(piece.scores, piece.block, out=piece.mixed)
        torch.sum(scores, -1, out=self._by_place)
        torch.index_select(self._by_place, 0, plan.items, out=self._by_item)
        torch.index_select(self._mixed, 0, plan.items, out=self._mixed_by_item)
        for total, term in (*self._steps, *self._mixed_steps):
            total.add_(term)
        torch.div(self._total, self._weight, out=out)

    def _weigh(self) -> None:
        """Scores into weights: e^(score - the row's highest), 0 where a key is hidden."""
        plan, scores = self._plan, self._scores
        for veil in self._veils:
            torch.minimum(veil.scores, veil.ceiling, out=veil.scores)
        torch.amax(scores, -1, out=self._by_place)
        torch.index_select(self._by_place, 0, plan.items, out=self._by_item)
        for highest, other in self._steps:
            torch.maximum(highest, other, out=highest)
        torch.index_select(self._by_row, 0, plan.query, out=self._top)
        scores.sub_(self._top[:, :, None])
        for veil in self._veils:
            veil.scores.mul_(veil.seen)  # exp is slow far below zero
        scores.exp_()
        for veil in self._veils:
            veil.scores.mul_(veil.seen)

    def _cut(self, strip: Strip, kv_heads: int, head_dim: int, space: Workspace) -> list[_Piece]:
        """A strip in pieces."""
        pairs = strip.tiles * kv_heads
        own = slice(strip.start, strip.start + pairs * strip.size)
        query = self._query[own].view(pairs, -1, head_dim)
        scores = self._scores[own].view(pairs, -1, BLOCK)
        mixed = self._mixed[own].view(pairs, -1, head_dim)
        step = max(1, _GATHER_BYTES // (4 * BLOCK * head_dim))
        pieces = []
        for start in range(0, pairs, step):
            end = min(start + step, pairs)
            gathered = space.take("block", (end - start) * BLOCK, head_dim)
            block = gathered.view(end - start, BLOCK, head_dim)
            pieces.append(
                _Piece(
                    strip.keys[start * BLOCK : end * BLOCK],
                    gathered,
                    block,
                    block.transpose(1, 2),
                    query[start:end],
                    scores[start:end],
                    mixed[start:end],
                )
            )
        return pieces


def _veil(strip: Strip, scores: Tensor, kv_heads: int) -> _Veil:
    """What a strip hides."""
    end = strip.start + strip.tiles * kv_heads * strip.size
    shape = (strip.tiles, kv_heads, strip.size, -1, BLOCK)
    part = scores[strip.start : end].view(shape)[strip.masked_from :]
    hidden = strip.mask.expand(part.shape)
    ceiling = torch.where(hidden, _HIDDEN, torch.inf)
    return _Veil(part, ceiling, torch.where(hidden, 0.0, 1.0))


def _columns(items: Tensor, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """How every row's items (items, n) are combined in place, in block order: into the first, from
    the second of each pair."""
    return [(items[:count], items[start : start + count]) for start, count in plan.columns[1:]]
