"""The embedded engine's forward pass: a Llama-family model over spans of many sequences at once.

Exact mode: a row's logits have the same bits whatever else is in the call, however its prefix was
cut into calls, and with each of the thread counts that the self-check has compared. Torch or the
compiled library computes what a layer does with its rows between the matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.choices import Kernel
from runtime.embedded.model.attention import Attention, NativeAttention
from runtime.embedded.model.batch_plan import BatchPlan, KVStore, Span, build_plan
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.layers import (
    Layer,
    Rotation,
    Weights,
    Workspace,
    cut,
    normalise,
    product,
    rotate,
)
from runtime.embedded.model.native import Native, Norm, Projection
from runtime.embedded.model.selfcheck import QUERY_TILES, Tiles, check_tiles, choose_kernel
from runtime.embedded.model.threads import ThreadTuner


class Forward:
    """A model's weights and its pass. Not thread-safe: one call at a time."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        exact: bool = True,
        threads: int | Sequence[int],
        head: bool = True,
        kernel: Kernel = "auto",
    ) -> None:
        """Load ``checkpoint`` in float32 and choose the tiles.

        ``head`` False: ``run`` returns the hidden state after the final norm instead of logits.
        ``threads``: torch's threads, set for the whole process before every pass; of several
        numbers, the fastest for a pass's size. ``exact`` False: one matrix product over all rows;
        results then depend on the batch by some 1e-7. ``kernel``: what computes attention.
        """
        self.threads = ThreadTuner((threads,) if isinstance(threads, int) else threads)
        counts = self.threads.counts
        torch.set_num_threads(counts[-1])
        self.config = ModelConfig.from_checkpoint(checkpoint)
        self.exact = exact
        with torch.inference_mode():
            self._weights = Weights.load(checkpoint, self.config, head=head)
            self._native = choose_kernel(kernel, self.config, counts)
            self.tiles = Tiles(rows=(), queries=QUERY_TILES)
            if exact:
                attends = self._native is None
                self.tiles = check_tiles(self._weights, self.config, counts, attends=attends)
            self._rotation = Rotation(self.config)
        self._space = Workspace()

    @property
    def kernel(self) -> str:
        """What computes attention: ``native`` or ``torch``."""
        return "torch" if self._native is None else "native"

    @property
    def attends(self) -> str:
        """What computes attention: ``torch``, or the name of the compiled library."""
        return "torch" if self._native is None else self._native.name

    def new_store(self, slots: int) -> KVStore:
        """An empty store for ``slots`` tokens of this model."""
        with torch.inference_mode():
            return KVStore(self.config, slots)

    def run(self, spans: Sequence[Span], store: KVStore) -> Tensor:
        """Compute new positions, write their KV, return logits.

        Returns float32 (rows from ``logits_from`` on, vocab) in span order; without a head (these
        rows, hidden). Raises ValueError for a span that exceeds the context.
        """
        with self.threads.timed(_rows(spans)) as count, torch.inference_mode():
            _set_threads(count)
            plan = self._plan(spans, store)
            hidden = self._blocks(plan, store)
            return self._logits(hidden, _logit_rows(spans, plan))

    def states(self, spans: Sequence[Span], store: KVStore, layers: int) -> Tensor:
        """Run the first ``layers`` layers; returns the residual stream after them, each row scaled
        to root mean square 1: float32 (rows from ``logits_from`` on, hidden) in span order. Raises
        ValueError for a span that exceeds the context.
        """
        _set_threads(self.threads.at(_rows(spans)))
        with torch.inference_mode():
            plan = self._plan(spans, store)
            stream = self._blocks(plan, store, layers)
            rows = stream.index_select(0, _logit_rows(spans, plan))
            return normalise(rows, self.config.norm_eps, torch.empty_like(rows))

    def _plan(self, spans: Sequence[Span], store: KVStore) -> BatchPlan:
        longest = max((len(s.slots) for s in spans), default=0)
        if longest > self.config.context:
            raise ValueError(f"spans: {longest} positions; the context is {self.config.context}")
        return build_plan(spans, padding=store.padding, window=self.config.sliding_window)

    def _blocks(self, plan: BatchPlan, store: KVStore, layers: int | None = None) -> Tensor:
        """The residual stream after all layers, or the first ``layers``: (padded rows, hidden) in
        the plan's row order."""
        rotation, space, library = self._rotation, self._space, self._native
        layers_pass = _Pass(plan, store, self.config, self.tiles, rotation, space, library)
        return layers_pass.run(self._weights.layers[:layers], self._weights.embedding)

    def _logits(self, stream: Tensor, logit_rows: Tensor) -> Tensor:
        """Apply the final norm, and the head if there is one, to ``logit_rows``: a new tensor."""
        pieces = cut(len(logit_rows), self.tiles.rows) if len(logit_rows) else [(0, 0)]
        rows = pieces[-1][1]
        padded = torch.zeros(rows, dtype=torch.int64)
        padded[: len(logit_rows)] = logit_rows
        last = stream.index_select(0, padded)
        normal = normalise(last, self.config.norm_eps, torch.empty_like(last))
        if self._weights.head is None:
            return normal.mul_(self._weights.last_norm)[: len(logit_rows)]
        return product(normal, pieces, self._weights.head.times)[: len(logit_rows)]


class _Pass:
    """Runs the layers of one call: matrix products, and the row operations between them."""

    def __init__(
        self,
        plan: BatchPlan,
        store: KVStore,
        config: ModelConfig,
        tiles: Tiles,
        rotation: Rotation,
        space: Workspace,
        library: Native | None,
    ) -> None:
        self._plan, self._store = plan, store
        count, mixed = len(plan.rows.tokens), config.heads * config.head_dim
        self._tiles = cut(count, tiles.rows)
        self._rows = rows = self._tiles[-1][1]
        self._stream = space.take("stream", rows, config.hidden)
        self._normal = space.take("normal", rows, config.hidden)
        self._mixed = space.take("attended", rows, mixed)
        self._attention_out = self._mixed[:count].view(count, config.heads, config.head_dim)
        turn = rotation.at(self._padded(plan.rows.positions))
        self._row_ops: NativeRows | TorchRows
        if library is not None:
            self._row_ops = NativeRows(library, plan, turn, store, config, space)
        else:
            self._row_ops = TorchRows(plan, tiles.queries, turn, store, config, space)

    def run(self, layers: Sequence[Layer], embedding: Tensor) -> Tensor:
        """The residual stream (padded rows, hidden) after ``layers``, in the plan's row order."""
        stream, normal, row_ops = self._stream, self._normal, self._row_ops
        torch.index_select(embedding, 0, self._padded(self._plan.rows.tokens), out=stream)
        added = None
        for number, layer in enumerate(layers):
            row_ops.normalise(stream, added, normal)
            added = self._attend(layer, number)
            row_ops.normalise(stream, added, normal)
            gated = product(normal, self._tiles, layer.gate.gate)
            gated.mul_(product(normal, self._tiles, layer.up.times))
            added = product(gated, self._tiles, layer.down.times)
        return stream if added is None else stream.add_(added)

    def _attend(self, layer: Layer, number: int) -> Tensor:
        """What a layer's attention adds to the stream; writes new keys and values to the store."""
        row_ops, store, attention_slice = self._row_ops, self._store, self._store.slice
        row_ops.project(product(self._normal, self._tiles, layer.qkv.times), layer, number)
        if attention_slice is not None and attention_slice.layer == number:
            attention_slice.note(torch.from_numpy(self._plan.rows.writes), row_ops.query)
        keys, values = store.keys[number], store.values[number]
        row_ops.attention.run(row_ops.query, keys, values, self._attention_out)
        added = product(self._mixed, self._tiles, layer.output.times)
        return added if layer.output_bias is None else added.add_(layer.output_bias)

    def _padded(self, ids: NDArray[np.int64]) -> Tensor:
        """``ids`` (rows,), padded with zeros for the rows that only fill the last tile."""
        padded = torch.zeros(self._rows, dtype=torch.int64)
        padded[: len(ids)] = torch.from_numpy(ids)
        return padded


class TorchRows:
    """The row operations of a pass between its matrix products, by torch.

    Buffers are made once and used by every layer. ``query``: the queries projected last, (rows,
    heads, head_dim), scaled; ``attention`` runs over them.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sizes: Sequence[int],
        turn: tuple[Tensor, Tensor],
        store: KVStore,
        config: ModelConfig,
        space: Workspace,
    ) -> None:
        """``sizes``: rows of a tile of attention; ``turn``: RoPE of the rows' positions, including
        padding, as from ``Rotation.at``."""
        self._count, self._heads = len(plan.rows.tokens), config.heads
        self._turned_heads, self._eps = config.heads + config.kv_heads, config.norm_eps
        self.query = space.take("query", self._count, config.heads, config.head_dim)
        self._scratch = space.take("turn", len(turn[0]), self._turned_heads, config.head_dim)
        self._store, self._writes = store, store.index(torch.from_numpy(plan.rows.writes))
        self.attention = Attention(plan, sizes, config, store.rows, space)
        self._turn = turn

    def normalise(self, stream: Tensor, added: Tensor | None, out: Tensor) -> None:
        """Add to the residual stream and norm its rows into ``out``, all (rows, hidden)."""
        if added is not None:
            stream.add_(added)
        normalise(stream, self._eps, out)

    def project(self, projected: Tensor, layer: Layer, number: int) -> None:
        """Turn a layer's ``projected`` (rows, heads and twice the key heads) into its queries, and
        write the new keys and values to the store."""
        if layer.qkv_bias is not None:
            projected.add_(layer.qkv_bias)
        heads = projected.view(len(projected), -1, self.query.shape[2])
        turned = heads[:, : self._turned_heads]
        if layer.head_norm is not None:
            normal = normalise(turned, self._eps, self._scratch)
            torch.mul(normal, layer.head_norm, out=turned)
        rotate(turned, *self._turn, self._scratch)
        new = heads[: self._count, self._heads :].reshape(len(self._writes), -1)
        self._store.both[number].index_copy_(0, self._writes, new)
        self.query.copy_(heads[: self._count, : self._heads])


class NativeRows:
    """As ``TorchRows``, by the compiled library in a fraction of the time."""

    def __init__(
        self,
        library: Native,
        plan: BatchPlan,
        turn: tuple[Tensor, Tensor],
        store: KVStore,
        config: ModelConfig,
        space: Workspace,
    ) -> None:
        """``turn``: RoPE of the rows' positions, as from ``Rotation.at``."""
        count = len(plan.rows.tokens)
        self.query = space.take("query", count, config.heads, config.head_dim)
        self._library, self._store = library, store
        self.attention = NativeAttention(library, plan, config, space)
        self._norm = Norm(width=config.hidden, eps=config.norm_eps)
        self._slots, self._turn = plan.rows.writes, turn  # keep alive: the library reads them
        self._projection = Projection(
            cosine=turn[0].data_ptr(),
            sine=turn[1].data_ptr(),
            slots=self._slots.ctypes.data,
            query=self.query.data_ptr(),
            rows=count,
            heads=config.heads,
            kv_heads=config.kv_heads,
            size=config.head_dim,
            store_rows=store.rows,
            eps=config.norm_eps,
        )

    def normalise(self, stream: Tensor, added: Tensor | None, out: Tensor) -> None:
        """Add to the residual stream and norm its rows into ``out``, all (rows, hidden)."""
        call = self._norm
        call.stream, call.out, call.rows = stream.data_ptr(), out.data_ptr(), len(stream)
        call.added = None if added is None else added.data_ptr()
        self._library.norm(call)

    def project(self, projected: Tensor, layer: Layer, number: int) -> None:
        """Turn a layer's ``projected`` (rows, heads and twice the key heads) into its queries, and
        write the new keys and values to the store."""
        call, store = self._projection, self._store
        call.projected = projected.data_ptr()
        call.bias = _address(layer.qkv_bias)
        call.scales = _address(layer.head_norm)
        call.keys, call.values = store.keys[number].data_ptr(), store.values[number].data_ptr()
        self._library.project(call)


def _rows(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _set_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _logit_rows(spans: Sequence[Span], plan: BatchPlan) -> Tensor:
    """The rows that get logits, in span order, as places in the plan's row order."""
    new = np.array([len(s.tokens) for s in spans], dtype=np.int64)
    since = np.array([s.logits_from for s in spans], dtype=np.int64)
    within = np.arange(int(new.sum())) - np.repeat(new.cumsum() - new, new)
    place = np.empty_like(plan.rows.order)
    place[plan.rows.order] = np.arange(len(place))
    return torch.from_numpy(place[within >= np.repeat(since, new)])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
