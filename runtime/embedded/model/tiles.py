"""How torch attends: the items of a block stand together in tiles of a fixed number of rows.

A tile is a matrix product of a size that was seen to give the same bits on this machine; a block
that many rows share is gathered once a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.plan import BLOCK, BatchPlan, Ints, Items


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
class Tiling:
    """A plan's items dealt to tiles, and where everything lies.

    ``places``: length of the flat arrays. ``query`` (places,): the (row, head) each holds, as
    row x kv_heads + head. ``items`` (items x kv_heads,): the place of each item and head.
    ``columns``: for every column, its first item and how many rows it has. ``veils``: the ranges of
    items (first, last + 1) that hide keys; ``mask`` (items in them, BLOCK) says which.
    """

    strips: tuple[Strip, ...]
    places: int
    query: Tensor
    items: Tensor
    columns: tuple[tuple[int, int], ...]
    veils: tuple[tuple[int, int], ...]
    mask: Tensor


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


def tiled(plan: BatchPlan, sizes: Sequence[int], kv_heads: int, store_rows: int) -> Tiling:
    """Deal a plan's items to tiles and flatten these over key/value heads.

    ``sizes``: rows a tile may have, descending; ``store_rows``: rows of a head in the store.
    """
    items, slots32, columns = plan.items, plan.slots.astype(np.int32), plan.columns
    deals = _deal(items, len(plan.slots), sizes)
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
        slots = slots32[deal.blocks]
        keys = (slots[:, None] + (head * store_rows).astype(np.int32)[:, None]).reshape(-1)
        strips.append(Strip(size, tiles, places, torch.from_numpy(keys)))
        places += tiles * kv_heads * size
    veils = _veils(items, columns)
    return Tiling(
        tuple(strips),
        places,
        torch.from_numpy(np.concatenate(queries)),
        torch.from_numpy(place_of.reshape(-1)),
        tuple(zip(columns[:-1].tolist(), np.diff(columns).tolist(), strict=True)),
        tuple(veils),
        torch.from_numpy(_mask(items, veils)),
    )


def _deal(items: Items, blocks: int, sizes: Sequence[int]) -> list[_Deal]:
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


def _veils(items: Items, columns: Ints) -> list[tuple[int, int]]:
    """For every column with hidden keys, the range of items from the first to the last of them."""
    hidden = np.flatnonzero(items.hidden())
    bounds = np.searchsorted(hidden, columns)
    return [(int(hidden[a]), int(hidden[b - 1]) + 1) for a, b in pairwise(bounds) if a < b]


def _mask(items: Items, veils: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """(items in ``veils``, BLOCK): keys that the item's row must not see."""
    within = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in veils)])
    key = np.arange(BLOCK)
    mask = key > items.high[within][:, None]
    low = items.low[within]
    if (low >= 0).any():
        mask |= key <= low[:, None]
    return mask
