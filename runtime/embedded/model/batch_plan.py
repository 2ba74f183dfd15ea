"""Which query rows meet which key blocks, and the store in which the keys and values lie by slot.

A plan is built once for a forward and used by every layer. Keys are cut into blocks of ``BLOCK`` by
absolute position. A row at position p attends to the blocks 0 .. p // BLOCK (from the window's
start on, where there is one). An *item* is one row with one of its blocks. Rows are sorted by
falling number of blocks and items by (column, row): the items of a column are then the first rows
in order.
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
    of every position from 0; the last n are written by this call. A slot's content must follow
    from the token path down to it: spans that share a slot share everything above. Rows from
    ``logits_from`` on (counted within the span) get logits: n for none, n - 1 for the last only.
    """

    tokens: Ints
    start: int
    slots: Ints
    logits_from: int


@dataclass(frozen=True, slots=True)
class QueryRows:
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
class Items:
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
class BatchPlan:
    """Everything the attention of a call needs beyond the numbers.

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
    """Cut every span's slots into blocks and merge those that are the same.

    Returns the distinct ones' slots (blocks, BLOCK), and ``of`` and ``start``: a span's j-th block
    is ``of[start[span] + j]``.

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
    return table[first], of, start


def _columns(rows: QueryRows) -> Ints:
    """The first item of every column, and the number of items at the end: (columns + 1,)."""
    having = np.bincount(rows.count)[::-1].cumsum()[::-1][1:]  # rows with more than c blocks
    return np.concatenate(([0], having.cumsum()))


def _items(
    rows: QueryRows, block_of: Ints, first: Ints, columns: Ints, window: int | None
) -> Items:
    having = np.diff(columns)
    row = np.arange(columns[-1]) - np.repeat(columns[:-1], having)
    index = rows.first[row] + np.repeat(np.arange(len(having)), having)
    high = rows.positions[row] - index * BLOCK
    low = np.full_like(high, -1) if window is None else high - window
    return Items(row, block_of[first[rows.span[row]] + index], low, high)


class AttentionSlice:
    """The slice of attention that says what later tokens pay to a block (ArborKV, section 4, a).

    One layer, the middle one, where attention goes by what is said more than by how near it is; of
    it the first key head with the query heads that share it, whose weights are averaged. Its keys
    are cached anyway. Its queries are kept by slot, a copy of what a pass has computed: nothing
    goes back, so no bit of the model's output can depend on it.
    """

    def __init__(self, config: ModelConfig, rows: int) -> None:
        """``rows``: slots of the store, its padding included."""
        self.layer = middle_layer(config.layers) - 1
        self._heads = config.group
        self._window = config.sliding_window
        self._queries = torch.empty(rows, config.group * config.head_dim)

    def note(self, slots: Tensor, query: Tensor) -> None:
        """Keep the layer's ``query`` (n, heads, head_dim), scaled, of tokens at ``slots`` (n,)."""
        self._queries.index_copy_(0, slots, query[:, : self._heads].flatten(1))

    def weights(self, keys: Tensor, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The softmax (n,) of the last token's query over the keys of its path, heads averaged.

        ``keys``: the layer's, as in ``KVStore``; beyond a sliding window they get 0.
        """
        since = 0 if self._window is None else max(0, len(slots) - self._window)
        seen = keys.numpy()[slots[since:]]
        scores = seen @ self._queries.numpy()[slots[-1]].reshape(self._heads, -1).T
        weights = np.exp(scores - scores.max(0), dtype=np.float64)
        weights /= weights.sum(0)
        shares = np.zeros(len(slots))
        shares[since:] = weights.mean(1)
        return shares


class KVStore:
    """Float32 keys and values of ``slots`` tokens for every layer.

    ``keys[layer]`` and ``values[layer]`` are (kv_heads x rows, head_dim) with row
    ``head * rows + slot``, so that a head's keys of a block are gathered as whole rows;
    ``both[layer]`` is the one after the other, so that a token's are written at once. The slot
    ``padding`` = ``slots`` stays zero and fills blocks that end early.
    """

    def __init__(self, config: ModelConfig, slots: int) -> None:
        """``slots``: tokens to hold, at least 1."""
        self._config = config
        self.kv_heads = config.kv_heads
        self.slots = self.padding = slots
        self.rows = slots + 1
        self.both = [self._empty() for _ in range(config.layers)]
        each = self.kv_heads * self.rows
        self.keys = [layer[:each] for layer in self.both]
        self.values = [layer[each:] for layer in self.both]
        self.slice: AttentionSlice | None = None

    def watch(self) -> None:
        """From now on keep what ``attention`` needs; the passes compute what they would."""
        if self.slice is None:
            self.slice = AttentionSlice(self._config, self.rows)

    def attention(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the token in the last of a path's ``slots`` (n,) pays to each of them: (n,).

        Of the slice that is watched, and adding up to 1; the tokens were computed while it was.
        """
        assert self.slice is not None, "nobody watches this store"
        return self.slice.weights(self.keys[self.slice.layer], slots)

    def index(self, slots: Tensor) -> Tensor:
        """Rows of ``slots`` (n,) in ``both``: int64 (n x 2 kv_heads,), heads fastest."""
        heads = torch.arange(2 * self.kv_heads) * self.rows
        return (slots[:, None] + heads).flatten()

    def _empty(self) -> Tensor:
        """A layer without tokens. What is written before it is read is not touched here: memory
        that no token has lain in is none of the machine's yet."""
        made = torch.empty(2 * self.kv_heads * self.rows, self._config.head_dim)
        made.view(2 * self.kv_heads, self.rows, -1)[:, self.padding] = 0.0
        return made
