"""Which query rows meet which key blocks: built once for a forward, used by every layer.

Keys are cut into blocks of ``BLOCK`` by absolute position. A row at position p attends to the
blocks 0 .. p // BLOCK (from the window's start on, where there is one). An *item* is one row with
one of its blocks; items of the same block stand together in tiles of a fixed number of rows, so
that a block many rows share is read once a tile. Rows are sorted by falling number of blocks and
items by (column, row): the items of a column are then the first rows in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new positions of one sequence.

    ``tokens`` (n,): ids at positions start .. start + n - 1. ``slots`` (start + n,): the store slot
    of every position from 0; the last n are written by this call. A slot's content must follow
    from the token path down to it: spans that share a slot share everything above. Rows from
    ``logits_from`` on (counted within the span) get logits: n for none, n - 1 for the last only.
    """

    tokens: Ints
    start: int
    slots: Ints
    logits_from: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The query rows of a call, sorted by falling number of blocks.

    All (rows,): token ids, absolute positions, slots to write; ``order`` is the row's place in
    span order, ``span`` its span, ``first`` and ``count`` its first block and how many it reads.
    """

    tokens: Ints
    positions: Ints
    writes: Ints
    order: Ints
    span: Ints
    first: Ints
    count: Ints


@dataclass(frozen=True, slots=True)
class Strip:
    """The tiles of one size. A tile holds ``size`` rows (padded with row 0) and one block.

    ``start``: its first place in the flat arrays, whose places run (tile, head, row) for key/value
    heads. ``keys`` (tiles x kv_heads x BLOCK,): store rows, int32, by which gathering is faster.
    """

    size: int
    tiles: int
    start: int
    keys: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the attention of a call needs beyond the numbers.

    ``places``: length of the flat arrays. ``query`` (places,): the (row, head) each holds, as
    row x kv_heads + head. ``items`` (items x kv_heads,): the place of each item and head.
    ``columns``: for every column, its first item and how many rows it has. ``veils``: the ranges of
    items (first, last + 1) that hide keys; ``mask`` (items in them, BLOCK) says which.
    """

    rows: Rows
    strips: tuple[Strip, ...]
    places: int
    query: Tensor
    items: Tensor
    columns: tuple[tuple[int, int], ...]
    veils: tuple[tuple[int, int], ...]
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The distinct key blocks of a call.

    ``slots`` (blocks, BLOCK); a span's j-th block is ``of[start[span] + j]``.
    """

    slots: Ints
    of: Ints
    start: Ints


@dataclass(frozen=True, slots=True)
class _Items:
    """Every (row, block) pair in column order, (items,) each.

    The row sees the block's keys above ``low`` and up to ``high``, counted within the block.
    """

    row: Ints
    block: Ints
    low: Ints
    high: Ints

    def hidden(self) -> NDArray[np.bool_]:
        """Whether the row must not see some key of the block."""
        return (self.high < BLOCK - 1) | (self.low >= 0)


@dataclass(frozen=True, slots=True)
class _Deal:
    """Items dealt to tiles of one size.

    ``blocks`` (tiles,): each tile's block; ``items``: which items are here, ``tile`` and ``place``
    where each went.
    """

    size: int
    blocks: Ints
    items: Ints
    tile: Ints
    place: Ints


def build_plan(
    spans: Sequence[Span],
    *,
    padding: int,
    kv_heads: int,
    sizes: Sequence[int],
    window: int | None = None,
) -> Plan:
    """Plan a call.

    ``padding``: the store's zero slot. ``sizes``: rows a tile may have, descending. ``window``: the
    sliding window in tokens. Raises ValueError for a span whose lengths do not fit together.
    """
    new, total, start = _lengths(spans)
    slots = np.concatenate([s.slots for s in spans]).astype(np.int64, copy=False)
    rows = _rows(spans, new, total, start, slots, window)
    blocks = _blocks(slots, total, padding)
    columns = _columns(rows)
    items = _items(rows, blocks, columns, window)
    deals = _deal(items, len(blocks.slots), sizes)
    return _assemble(rows, blocks, items, deals, columns, padding + 1, kv_heads)


def _lengths(spans: Sequence[Span]) -> tuple[Ints, Ints, Ints]:
    """New tokens, all tokens and first new position of every span, (spans,) each."""
    if not spans:
        raise ValueError("spans: none; at least one is needed")
    table = np.array([(len(s.tokens), len(s.slots), s.start) for s in spans], dtype=np.int64)
    new, total, start = table.T
    wrong = np.flatnonzero((new < 1) | (start < 0) | (total != start + new))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"spans[{i}]: {new[i]} tokens from position {start[i]} with {total[i]} slots; "
            "at least one token, and as many slots as positions, are needed"
        )
    return new, total, start


def _rows(
    spans: Sequence[Span], new: Ints, total: Ints, start: Ints, slots: Ints, window: int | None
) -> Rows:
    tokens = np.concatenate([s.tokens for s in spans]).astype(np.int64, copy=False)
    span = np.repeat(np.arange(len(new)), new)
    positions = np.arange(len(tokens)) + np.repeat(start - (new.cumsum() - new), new)
    writes = slots[(total.cumsum() - total)[span] + positions]
    first = np.zeros_like(positions)
    if window is not None:
        first = np.maximum(positions - window + 1, 0) // BLOCK
    count = positions // BLOCK - first + 1
    order = np.argsort(-count, kind="stable")
    return Rows(
        tokens[order],
        positions[order],
        writes[order],
        order,
        span[order],
        first[order],
        count[order],
    )


def _blocks(slots: Ints, total: Ints, padding: int) -> _Blocks:
    """Cut every span's slots into blocks and merge those that are the same.

    A full block is named by its last slot (that slot's content fixes the path above it), the
    unfinished last block of a span by the span.
    """
    blocks = -(-total // BLOCK)
    start = blocks.cumsum() - blocks
    table = np.full((int(blocks.sum()), BLOCK), padding, dtype=np.int64)
    shift = start * BLOCK - (total.cumsum() - total)
    table.reshape(-1)[np.arange(len(slots)) + np.repeat(shift, total)] = slots
    name = table[:, -1].copy()
    partial = np.flatnonzero(total % BLOCK)
    name[start[partial] + blocks[partial] - 1] = padding + 1 + partial
    _, first, of = np.unique(name, return_index=True, return_inverse=True)
    return _Blocks(table[first], of, start)


def _columns(rows: Rows) -> Ints:
    """The first item of every column, and the number of items at the end: (columns + 1,)."""
    having = np.bincount(rows.count)[::-1].cumsum()[::-1][1:]  # rows with more than c blocks
    return np.concatenate(([0], having.cumsum()))


def _items(rows: Rows, blocks: _Blocks, columns: Ints, window: int | None) -> _Items:
    having = np.diff(columns)
    row = np.arange(columns[-1]) - np.repeat(columns[:-1], having)
    index = rows.first[row] + np.repeat(np.arange(len(having)), having)
    high = rows.positions[row] - index * BLOCK
    low = np.full_like(high, -1) if window is None else high - window
    return _Items(row, blocks.of[blocks.start[rows.span[row]] + index], low, high)


def _deal(items: _Items, blocks: int, sizes: Sequence[int]) -> list[_Deal]:
    """Deal the items of each block to tiles, large ones first."""
    block = items.block
    wanted = np.bincount(block, minlength=blocks)
    sort = np.argsort(block, kind="stable")
    rank = np.empty_like(block)  # an item's place among those of its block
    rank[sort] = np.arange(len(block)) - np.repeat(wanted.cumsum() - wanted, wanted)
    deals, done = [], np.zeros_like(wanted)
    for number, size in enumerate(sizes):
        left = np.maximum(wanted - done, 0)
        spare = 0 if number == len(sizes) - 1 else size // 2
        take = left // size + (left % size > spare)
        if not take.any():
            continue
        first = take.cumsum() - take
        after = rank - done[block]
        here = np.flatnonzero((after >= 0) & (after < (take * size)[block]))
        tile = first[block[here]] + after[here] // size
        of_tile = np.repeat(np.arange(blocks), take)
        deals.append(_Deal(size, of_tile, here, tile, after[here] % size))
        done = done + take * size
    return deals


def _veils(items: _Items, columns: Ints) -> list[tuple[int, int]]:
    """For every column with hidden keys, the range of items from the first to the last of them."""
    hidden = np.flatnonzero(items.hidden())
    bounds = np.searchsorted(hidden, columns)
    return [(int(hidden[a]), int(hidden[b - 1]) + 1) for a, b in pairwise(bounds) if a < b]


def _mask(items: _Items, veils: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """(items in ``veils``, BLOCK): keys that the item's row must not see."""
    within = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in veils)])
    key = np.arange(BLOCK)
    mask = key > items.high[within][:, None]
    low = items.low[within]
    if (low >= 0).any():
        mask |= key <= low[:, None]
    return mask


def _assemble(
    rows: Rows,
    blocks: _Blocks,
    items: _Items,
    deals: Sequence[_Deal],
    columns: Ints,
    store_rows: int,
    kv_heads: int,
) -> Plan:
    """Flatten the tiles over key/value heads and note where everything lies."""
    head = np.arange(kv_heads)
    strips, queries = [], []
    place_of = np.empty((len(items.row), kv_heads), dtype=np.int64)
    places = 0
    for deal in deals:
        tiles, size, tile, place = len(deal.blocks), deal.size, deal.tile, deal.place
        place_of[deal.items] = places + (tile[:, None] * kv_heads + head) * size + place[:, None]
        query = np.zeros((tiles, size), dtype=np.int64)
        query[tile, place] = items.row[deal.items]
        queries.append((query[:, None] * kv_heads + head[:, None]).reshape(-1))
        slots = blocks.slots.astype(np.int32)[deal.blocks]
        keys = (slots[:, None] + (head * store_rows).astype(np.int32)[:, None]).reshape(-1)
        strips.append(Strip(size, tiles, places, torch.from_numpy(keys)))
        places += tiles * kv_heads * size
    veils = _veils(items, columns)
    return Plan(
        rows,
        tuple(strips),
        places,
        torch.from_numpy(np.concatenate(queries)),
        torch.from_numpy(place_of.reshape(-1)),
        tuple(zip(columns[:-1].tolist(), np.diff(columns).tolist(), strict=True)),
        tuple(veils),
        torch.from_numpy(_mask(items, veils)),
    )
