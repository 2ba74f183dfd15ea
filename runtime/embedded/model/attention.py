"""Attention in fixed pieces: (query tile) x (key block of 32), merged in block order.

softmax(q K / sqrt(d)) V of one row is sum_b e^(q K_b - m) V_b over sum_b e^(q K_b - m), with m the
exact maximum over all its keys, each block's two products in a tile of fixed size and the sums over
blocks taken in rising order. So a row's bits follow from its own query, keys and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import Workspace
from runtime.embedded.model.plan import BLOCK, BatchPlan
from runtime.embedded.model.tiles import Strip, Tiling, tiled

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
    """The weights of items some of whose keys are hidden, and two arrays of their shape:
    ``ceiling`` is -1e30 and ``seen`` 0 where a key is hidden, else infinite and 1."""

    weights: Tensor
    ceiling: Tensor
    seen: Tensor


class Attention:
    """The attention of one call. Buffers and their views are made once and serve every layer.

    Products run over tiles, whose places may be padding; what lies between them over items.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sizes: Sequence[int],
        config: ModelConfig,
        store_rows: int,
        space: Workspace,
    ) -> None:
        """``sizes``: rows a tile may have, descending; ``store_rows``: as in ``KVStore``."""
        kv_heads, group, head_dim = config.kv_heads, config.group, config.head_dim
        tiling = tiled(plan, sizes, kv_heads, store_rows)
        rows, items, heads = len(plan.rows.tokens), len(tiling.items), kv_heads * group
        self._tiling = tiling
        self._query = space.take("query_tiles", tiling.places, group * head_dim)
        self._tiles = space.take("score_tiles", tiling.places, group * BLOCK)
        self._mixed_tiles = space.take("mixed_tiles", tiling.places, group * head_dim)
        self._pieces = [p for s in tiling.strips for p in self._cut(s, kv_heads, head_dim, space)]
        self._weights = space.take("weights", items, group * BLOCK)
        self._mixed = space.take("mixed", items, group * head_dim)
        self._by_head = self._weights.view(-1, heads, BLOCK)
        self._sums = space.take("sums", items // kv_heads, heads)
        self._veils = _veils(tiling, self._by_head)
        self._columns = _columns(self._by_head, tiling)
        self._sum_steps = _steps(_columns(self._sums, tiling))
        self._mixed_steps = _steps(_columns(self._mixed.view(-1, heads * head_dim), tiling))
        self._total = self._mixed[: rows * kv_heads].view(rows, heads, head_dim)
        self._row_sums = self._sums[:rows, :, None]

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Fill ``out`` (rows, heads, head_dim) in the plan's row order.

        ``query`` (rows, heads, head_dim), contiguous and already scaled by 1 / sqrt(head_dim);
        ``keys`` and ``values`` of one layer as in ``KVStore``.
        """
        tiling = self._tiling
        flat = query.view(-1, self._query.shape[1])
        torch.index_select(flat, 0, tiling.query, out=self._query)
        for piece in self._pieces:
            torch.index_select(keys, 0, piece.rows, out=piece.gathered)
            torch.bmm(piece.query, piece.block_t, out=piece.scores)
        torch.index_select(self._tiles, 0, tiling.items, out=self._weights)
        self._weigh()
        self._tiles.index_copy_(0, tiling.items, self._weights)
        for piece in self._pieces:
            torch.index_select(values, 0, piece.rows, out=piece.gathered)
            torch.bmm(piece.scores, piece.block, out=piece.mixed)
        torch.index_select(self._mixed_tiles, 0, tiling.items, out=self._mixed)
        for total, term in (*self._sum_steps, *self._mixed_steps):
            total.add_(term)
        torch.div(self._total, self._row_sums, out=out)

    def _weigh(self) -> None:
        """Scores into weights, e^(score - the row's highest) or 0 where a key is hidden, and every
        block's sum of weights."""
        for veil in self._veils:
            torch.minimum(veil.weights, veil.ceiling, out=veil.weights)
        torch.amax(self._by_head, -1, out=self._sums)
        for highest, other in self._sum_steps:
            torch.maximum(highest, other, out=highest)
        for column in self._columns:
            column.sub_(self._row_sums[: len(column)])
        for veil in self._veils:
            veil.weights.mul_(veil.seen)  # exp is slow far below zero
        self._weights.exp_()
        for veil in self._veils:
            veil.weights.mul_(veil.seen)
        torch.sum(self._by_head, -1, out=self._sums)

    def _cut(self, strip: Strip, kv_heads: int, head_dim: int, space: Workspace) -> list[_Piece]:
        """A strip in pieces."""
        pairs = strip.tiles * kv_heads
        own = slice(strip.start, strip.start + pairs * strip.size)
        query = self._query[own].view(pairs, -1, head_dim)
        scores = self._tiles[own].view(pairs, -1, BLOCK)
        mixed = self._mixed_tiles[own].view(pairs, -1, head_dim)
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


def _veils(tiling: Tiling, weights: Tensor) -> list[_Veil]:
    """What is hidden of ``weights`` (items, heads, BLOCK)."""
    hidden = tiling.mask[:, None].expand(-1, weights.shape[1], -1)
    ceiling, seen = torch.where(hidden, _HIDDEN, torch.inf), torch.where(hidden, 0.0, 1.0)
    veils, at = [], 0
    for start, end in tiling.veils:
        here = slice(at, at + end - start)
        veils.append(_Veil(weights[start:end], ceiling[here], seen[here]))
        at += end - start
    return veils


def _columns(items: Tensor, tiling: Tiling) -> list[Tensor]:
    """The items (items, ...) of every column. Column by column they are the first rows'."""
    return [items[start : start + count] for start, count in tiling.columns]


def _steps(columns: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """How every row's items are combined in place, in block order: the second of each pair into
    the first, which is in the first column."""
    return [(columns[0][: len(column)], column) for column in columns[1:]]
