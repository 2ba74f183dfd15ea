"""Which query rows attend to which key blocks, and the store of keys and values by slot.

A plan is built once per forward pass and used by every layer. Keys are cut into blocks of ``BLOCK``
by absolute position. A row at position p attends to the blocks 0 .. p // BLOCK (with a sliding
window, from the window's start on). An *item* is one row with one of its blocks, and its *column*
is the block's index among the row's blocks. Rows are sorted by descending number of blocks and
items by (column, row), so the items of a column belong to the first rows in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.config import ModelConfig, middle_layer

BLOCK = 32

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new positions of one sequence.

    ``tokens`` (n,): ids at positions start .. start + n - 1. ``slots`` (start + n,): the store slot
    of every position from 0; this call writes the last n. A slot's content must follow from the
    token path up to it: spans that share a slot share all slots before it. Rows from
    ``logits_from`` on (counted within the span) get logits: n for none, n - 1 for the last only.
    """

    tokens: Ints
    start: int
    slots: Ints
    logits_from: int


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The query rows of a call, sorted by descending number of blocks.

    All (rows,): token ids, absolute positions, slots to write; ``order``: the row's place in span
    order; ``span``: its span; ``first`` and ``count``: its first block, and how many it reads.
    """

    tokens: Ints
    positions: Ints
    writes: Ints
    order: Ints
    span: Ints
    first: Ints
    count: Ints


@dataclass(frozen=True, slots=True)
class Items:
    """Every (row, block) pair in column order, (items,) each.

    The row attends to the block's keys above ``low`` and up to ``high``, counted in the block.
    """

    row: Ints
    block: Ints
    low: Ints
    high: Ints

    def hidden(self) -> NDArray[np.bool_]:
        """Whether some key of the block is hidden from the row, (items,)."""
        return (self.high < BLOCK - 1) | (self.low >= 0)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything that the attention of a call needs besides queries, keys and values.

    ``slots`` (blocks, BLOCK): the store slot of every key of the distinct blocks. ``columns``
    (columns + 1,): the first item of every column, and the number of items at the end.
    """

    rows: QueryRows
    slots: Ints
    items: Items
    columns: Ints


def build_plan(spans: Sequence[Span], *, padding: int, window: int | None = None) -> BatchPlan:
    """Plan a call of at least one span.

    ``padding``: the store's zero slot. ``window``: the sliding window in tokens.
    """
    lengths = [(len(s.tokens), len(s.slots), s.start) for s in spans]
    new, total, start = np.array(lengths, dtype=np.int64).T
    fits = (new >= 1) & (start >= 0) & (total == start + new)
    assert fits.all(), "a span without tokens, or without a slot for every position"
    slots = np.concatenate([s.slots for s in spans]).astype(np.int64, copy=False)
    rows = _rows(spans, new, total, start, slots, window)
    blocks, block_of, first = _blocks(slots, total, padding)
    columns = _columns(rows)
    return BatchPlan(rows, blocks, _items(rows, block_of, first, columns, window), columns)


def _rows(
    spans: Sequence[Span],
    new: Ints,
    total: Ints,
    start: Ints,
    slots: Ints,
    window: int | None,
) -> QueryRows:
    tokens = np.concatenate([s.tokens for s in spans]).astype(np.int64, copy=False)
    span = np.repeat(np.arange(len(new)), new)
    positions = np.arange(len(tokens)) + np.repeat(start - (new.cumsum() - new), new)
    writes = slots[(total.cumsum() - total)[span] + positions]
    first = np.zeros_like(positions)
    if window is not None:
        first = np.maximum(positions - window + 1, 0) // BLOCK
    count = positions // BLOCK - first + 1
    order = np.argsort(-count, kind="stable")
    return QueryRows(
        tokens[order],
        positions[order],
        writes[order],
        order,
        span[order],
        first[order],
        count[order],
    )


def _blocks(slots: Ints, total: Ints, padding: int) -> tuple[Ints, Ints, Ints]:
    """Cut every span's slots into blocks and merge equal blocks.

    Returns the distinct blocks' slots (blocks, BLOCK), and ``of`` and ``start``: a span's j-th
    block is ``of[start[span] + j]``.

    A full block is identified by its last slot, whose content determines the path before it; the
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
    return table[first], of, start


def _columns(rows: QueryRows) -> Ints:
    """The first item of every column, and the number of items at the end: (columns + 1,)."""
    row_counts = np.bincount(rows.count)[::-1].cumsum()[::-1][1:]  # rows with more than c blocks
    return np.concatenate(([0], row_counts.cumsum()))


def _items(
    rows: QueryRows, block_of: Ints, first: Ints, columns: Ints, window: int | None
) -> Items:
    row_counts = np.diff(columns)
    row = np.arange(columns[-1]) - np.repeat(columns[:-1], row_counts)
    index = rows.first[row] + np.repeat(np.arange(len(row_counts)), row_counts)
    high = rows.positions[row] - index * BLOCK
    low = np.full_like(high, -1) if window is None else high - window
    return Items(row, block_of[first[rows.span[row]] + index], low, high)


class AttentionSlice:
    """The slice of attention that gives what later tokens pay to a block (ArborKV, section 4, a).

    It reads one layer, the middle one, where attention follows content more than distance, and of
    that layer the first key head, averaged over the query heads that share it. The keys are cached
    anyway. Queries are stored by slot as a copy of what a pass computes; nothing flows back, so no
    bit of the model's output can depend on it.
    """

    def __init__(self, config: ModelConfig, rows: int) -> None:
        """``rows``: slots of the store, including its padding."""
        self.layer = middle_layer(config.layers) - 1
        self._heads = config.group
        self._window = config.sliding_window
        self._queries = torch.empty(rows, config.group * config.head_dim)

    def note(self, slots: Tensor, query: Tensor) -> None:
        """Store the layer's ``query`` (n, heads, head_dim), scaled, of tokens at ``slots`` (n,)."""
        self._queries.index_copy_(0, slots, query[:, : self._heads].flatten(1))

    def weights(self, keys: Tensor, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The softmax (n,) of the last token's query over the keys of its path, heads averaged.

        ``keys``: the layer's, as in ``KVStore``; beyond a sliding window they get 0.
        """
        since = 0 if self._window is None else max(0, len(slots) - self._window)
        visible_keys = keys.numpy()[slots[since:]]
        scores = visible_keys @ self._queries.numpy()[slots[-1]].reshape(self._heads, -1).T
        weights = np.exp(scores - scores.max(0), dtype=np.float64)
        weights /= weights.sum(0)
        shares = np.zeros(len(slots))
        shares[since:] = weights.mean(1)
        return shares


class KVStore:
    """Float32 keys and values of ``slots`` tokens for every layer.

    ``keys[layer]`` and ``values[layer]`` are (kv_heads x rows, head_dim) with row
    ``head * rows + slot``, so that a head's keys of a block are gathered as whole rows;
    ``both[layer]`` is keys and then values, so that a token's are written at once. The slot
    ``padding`` = ``slots`` stays zero and fills blocks that end early.
    """

    def __init__(self, config: ModelConfig, slots: int) -> None:
        """``slots``: tokens to hold, at least 1."""
        self._config = config
        self.kv_heads = config.kv_heads
        self.slots = self.padding = slots
        self.rows = slots + 1
        self.both = [self._empty() for _ in range(config.layers)]
        key_rows = self.kv_heads * self.rows
        self.keys = [layer[:key_rows] for layer in self.both]
        self.values = [layer[key_rows:] for layer in self.both]
        self.slice: AttentionSlice | None = None

    def watch(self) -> None:
        """From now on store what ``attention`` needs; this does not change what passes compute."""
        if self.slice is None:
            self.slice = AttentionSlice(self._config, self.rows)

    def attention(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The attention of the token in the last of a path's ``slots`` (n,) to each of them, (n,).

        Read from the slice, and adding up to 1. The last token must have been computed since
        ``watch`` was called.
        """
        assert self.slice is not None, "nobody watches this store"
        return self.slice.weights(self.keys[self.slice.layer], slots)

    def index(self, slots: Tensor) -> Tensor:
        """The rows of ``slots`` (n,) in ``both``: int64 (n x 2 kv_heads,), by slot, then head."""
        heads = torch.arange(2 * self.kv_heads) * self.rows
        return (slots[:, None] + heads).flatten()

    def _empty(self) -> Tensor:
        """An empty layer. Only the padding is written: the system does not allocate the memory of
        slots that no token has used yet."""
        layer = torch.empty(2 * self.kv_heads * self.rows, self._config.head_dim)
        layer.view(2 * self.kv_heads, self.rows, -1)[:, self.padding] = 0.0
        return layer
