"""Attention in fixed pieces: (query tile) x (key block of 32), merged in block order.

softmax(q K / sqrt(d)) V of one row is sum_b e^(q K_b - m) V_b over sum_b e^(q K_b - m), with m the
exact maximum over all its keys, each block's two products in a tile of fixed size and the sums over
blocks taken in rising order. So a row's bits follow from its own query, keys and position alone.

With torch, the items of a block are put into tiles of a fixed number of rows: a tile is a matrix
product of a size that gave the same bits on this machine, and a block that many rows share is
gathered once per tile. In the compiled library every row reads its blocks where they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.batch_plan import BLOCK, BatchPlan, Ints, Items
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.layers import Workspace
from runtime.embedded.model.native import Attending, Native

_GATHER_BYTES = 1 << 21  # keys gathered at once stay in the second-level cache
_HIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class Strip:
    """The tiles of one size. A tile holds ``size`` rows (padded with row 0) and one block.

    ``start``: the strip's first place in the flat arrays, whose places are ordered by (tile,
    key/value head, row). ``keys`` (tiles x kv_heads x BLOCK,): store rows; int32 gathers faster.
    """

    size: int
    tiles: int
    start: int
    keys: Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """A plan's items in tiles, and their places in the flat arrays.

    ``places``: length of the flat arrays. ``query`` (places,): the (row, head) of each place, as
    row x kv_heads + head. ``items`` (items x kv_heads,): the place of each item and head.
    ``columns``: for every column, its first item and how many rows it has. ``hidden``: the ranges
    of items (first, last + 1) with hidden keys; ``mask`` (items in them, BLOCK): the hidden keys.
    """

    strips: tuple[Strip, ...]
    places: int
    query: Tensor
    items: Tensor
    columns: tuple[tuple[int, int], ...]
    hidden: tuple[tuple[int, int], ...]
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _SizedTiles:
    """The items in tiles of one size.

    ``blocks`` (tiles,): each tile's block; ``items``: the items in these tiles, with the ``tile``
    and the ``place`` in it of each.
    """

    size: int
    blocks: Ints
    items: Ints
    tile: Ints
    place: Ints


def build_tiling(plan: BatchPlan, sizes: Sequence[int], kv_heads: int, store_rows: int) -> Tiling:
    """Put a plan's items into tiles and flatten the tiles over key/value heads.

    ``sizes``: rows a tile may have, descending; ``store_rows``: rows of a head in the store.
    """
    items, slots32, columns = plan.items, plan.slots.astype(np.int32), plan.columns
    by_size = _tiles_by_size(items, len(plan.slots), sizes)
    head = np.arange(kv_heads)
    strips, queries = [], []
    place_of = np.empty((len(items.row), kv_heads), dtype=np.int64)
    places = 0
    for sized in by_size:
        tiles, size, tile, place = len(sized.blocks), sized.size, sized.tile, sized.place
        place_of[sized.items] = places + (tile[:, None] * kv_heads + head) * size + place[:, None]
        query = np.zeros((tiles, size), dtype=np.int64)
        query[tile, place] = items.row[sized.items]
        queries.append((query[:, None] * kv_heads + head[:, None]).reshape(-1))
        slots = slots32[sized.blocks]
        keys = (slots[:, None] + (head * store_rows).astype(np.int32)[:, None]).reshape(-1)
        strips.append(Strip(size, tiles, places, torch.from_numpy(keys)))
        places += tiles * kv_heads * size
    hidden = _hidden_ranges(items, columns)
    return Tiling(
        tuple(strips),
        places,
        torch.from_numpy(np.concatenate(queries)),
        torch.from_numpy(place_of.reshape(-1)),
        tuple(zip(columns[:-1].tolist(), np.diff(columns).tolist(), strict=True)),
        tuple(hidden),
        torch.from_numpy(_mask(items, hidden)),
    )


def _tiles_by_size(items: Items, blocks: int, sizes: Sequence[int]) -> list[_SizedTiles]:
    """Put the items of each block into tiles, large ones first."""
    block = items.block
    item_counts = np.bincount(block, minlength=blocks)
    sort = np.argsort(block, kind="stable")
    rank = np.empty_like(block)  # an item's place among those of its block
    rank[sort] = np.arange(len(block)) - np.repeat(item_counts.cumsum() - item_counts, item_counts)
    by_size, offset = [], np.zeros_like(item_counts)
    for number, size in enumerate(sizes):
        remaining = np.maximum(item_counts - offset, 0)
        least = 0 if number == len(sizes) - 1 else size // 2
        tile_counts = remaining // size + (remaining % size > least)
        if not tile_counts.any():
            continue
        first_tile = tile_counts.cumsum() - tile_counts
        after = rank - offset[block]
        members = np.flatnonzero((after >= 0) & (after < (tile_counts * size)[block]))
        tile = first_tile[block[members]] + after[members] // size
        of_tile = np.repeat(np.arange(blocks), tile_counts)
        by_size.append(_SizedTiles(size, of_tile, members, tile, after[members] % size))
        offset = offset + tile_counts * size
    return by_size


def _hidden_ranges(items: Items, columns: Ints) -> list[tuple[int, int]]:
    """For every column with hidden keys, the range of items from the first to the last of them."""
    hidden = np.flatnonzero(items.hidden())
    bounds = np.searchsorted(hidden, columns)
    return [(int(hidden[a]), int(hidden[b - 1]) + 1) for a, b in pairwise(bounds) if a < b]


def _mask(items: Items, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """(items in ``ranges``, BLOCK): keys that the item's row must not see."""
    within = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in ranges)])
    key = np.arange(BLOCK)
    mask = key > items.high[within][:, None]
    low = items.low[within]
    if (low >= 0).any():
        mask |= key <= low[:, None]
    return mask


class _Piece(NamedTuple):
    """A run of (tile, head) pairs of a strip whose gathered keys fit the processor's cache.

    ``rows``: the keys' store rows; ``gathered`` (pairs x BLOCK, head_dim), ``block`` (pairs, BLOCK,
    head_dim) and its transpose ``block_t``: views of the buffer that keys are gathered into;
    ``query`` (pairs, n, head_dim), ``scores`` (pairs, n, BLOCK) and ``mixed`` (pairs, n, head_dim):
    the operands, n = rows of a tile x group.
    """

    rows: Tensor
    gathered: Tensor
    block: Tensor
    block_t: Tensor
    query: Tensor
    scores: Tensor
    mixed: Tensor


class _HiddenKeys(NamedTuple):
    """The weights of items some of whose keys are hidden, and two arrays of their shape:
    ``ceiling`` is -1e30 and ``visible`` 0 where a key is hidden, else infinite and 1."""

    weights: Tensor
    ceiling: Tensor
    visible: Tensor


class Attention:
    """The attention of one call. Buffers and their views are made once and used by every layer.

    Products run over tiles, which may contain padding; everything between them runs over items.
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
        tiling = build_tiling(plan, sizes, kv_heads, store_rows)
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
        self._hidden = _hidden_keys(tiling, self._by_head)
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
        """Turn scores into weights, e^(score - the row's highest) or 0 for hidden keys, and sum the
        weights of each block."""
        for keys in self._hidden:
            torch.minimum(keys.weights, keys.ceiling, out=keys.weights)
        torch.amax(self._by_head, -1, out=self._sums)
        for highest, other in self._sum_steps:
            torch.maximum(highest, other, out=highest)
        for column in self._columns:
            column.sub_(self._row_sums[: len(column)])
        for keys in self._hidden:
            keys.weights.mul_(keys.visible)  # because exp is slow far below zero
        self._weights.exp_()
        for keys in self._hidden:
            keys.weights.mul_(keys.visible)
        torch.sum(self._by_head, -1, out=self._sums)

    def _cut(self, strip: Strip, kv_heads: int, head_dim: int, space: Workspace) -> list[_Piece]:
        """Cut a strip into pieces."""
        pairs = strip.tiles * kv_heads
        places = slice(strip.start, strip.start + pairs * strip.size)
        query = self._query[places].view(pairs, -1, head_dim)
        scores = self._tiles[places].view(pairs, -1, BLOCK)
        mixed = self._mixed_tiles[places].view(pairs, -1, head_dim)
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


def _hidden_keys(tiling: Tiling, weights: Tensor) -> list[_HiddenKeys]:
    """The parts of ``weights`` (items, heads, BLOCK) with hidden keys, and their masks."""
    mask = tiling.mask[:, None].expand(-1, weights.shape[1], -1)
    ceiling, visible = torch.where(mask, _HIDDEN, torch.inf), torch.where(mask, 0.0, 1.0)
    keys, offset = [], 0
    for start, end in tiling.hidden:
        rows = slice(offset, offset + end - start)
        keys.append(_HiddenKeys(weights[start:end], ceiling[rows], visible[rows]))
        offset += end - start
    return keys


def _columns(items: Tensor, tiling: Tiling) -> list[Tensor]:
    """The items (items, ...) of every column, which belong to the first rows in order."""
    return [items[start : start + count] for start, count in tiling.columns]


def _steps(columns: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs that combine every row's items in place, in block order: each second one is combined
    into the first, which is a view of the first column."""
    return [(columns[0][: len(column)], column) for column in columns[1:]]


class NativeAttention:
    """``Attention`` by the compiled library; a row's bits do not depend on the rest of the call."""

    def __init__(
        self, library: Native, plan: BatchPlan, config: ModelConfig, space: Workspace
    ) -> None:
        items, blocks, rows = plan.items, len(plan.slots), len(plan.rows.tokens)
        count, heads, size = len(items.row), config.heads, config.head_dim
        order = np.argsort(items.block, kind="stable")
        place = np.empty(count, dtype=np.int32)
        place[order] = np.arange(count, dtype=np.int32)
        arrays = {
            "slots": plan.slots,
            "starts": _starts(items.block, blocks),
            "row": items.row[order],
            "low": items.low[order],
            "high": items.high[order],
            "row_starts": _starts(items.row, rows),
            "row_items": place[np.argsort(items.row, kind="stable")],
        }
        self._arrays = {
            name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()
        }
        self._scratch = {
            "highest": space.take("item_highest", count, heads),
            "sums": space.take("item_sums", count, heads),
            "mixed": space.take("item_mixed", count, heads, size),
        }
        self._library = library
        self._call = Attending(
            **{name: array.ctypes.data for name, array in self._arrays.items()},
            **{name: tensor.data_ptr() for name, tensor in self._scratch.items()},
            rows=rows,
            blocks=blocks,
            kv_heads=config.kv_heads,
            group=config.group,
            size=size,
        )

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """As ``Attention.run``; ``out`` is contiguous."""
        call = self._call
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.store_rows = len(keys) // call.kv_heads
        self._library.attend(call)


def _starts(values: np.ndarray, count: int) -> np.ndarray:
    """Where each of the values 0, 1, ... begins once ``values`` are sorted: (count + 1,)."""
    return np.concatenate(([0], np.bincount(values, minlength=count).cumsum()))
