"""The embedded engine's forward pass: a Llama-family model over spans of many sequences at once.

Exact mode: a row's logits are the same bits whatever else is in the call, however its prefix was
cut into calls, and with any of the thread counts that the self-check has compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.embedded.model.attention import Attention
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import (
    Rotation,
    Workspace,
    cut,
    normalise,
    product,
    rotate,
)
from runtime.embedded.model.kv_store import KVStore
from runtime.embedded.model.native import Kernel, Native
from runtime.embedded.model.native_attention import NativeAttention
from runtime.embedded.model.native_check import chosen
from runtime.embedded.model.plan import Plan, Span, build_plan
from runtime.embedded.model.selfcheck import Tiles, check_tiles, plain_tiles
from runtime.embedded.model.threads import Threads
from runtime.embedded.model.weights import Layer, Weights

__all__ = ["Forward", "Span"]


class Forward:
    """A model's weights and its pass. Not thread-safe: one call at a time."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        exact: bool = True,
        threads: int | Threads,
        counts: Sequence[int] = (),
        head: bool = True,
        kernel: Kernel = "auto",
    ) -> None:
        """Load ``checkpoint`` in float32 and fix the tiles.

        ``head`` False: for logits, ``run`` gives the hidden state after the final norm.
        ``threads``: torch's threads, set for the whole process before every pass; they may be set
        anew to any of ``counts``. ``exact`` False: one matrix product over all rows; results then
        depend on the batch by some 1e-7. ``kernel``: what attends.
        """
        threads = Threads.same(threads) if isinstance(threads, int) else threads
        torch.set_num_threads(threads.most)
        self.config = ModelConfig.from_checkpoint(checkpoint)
        self.exact = exact
        self.threads = threads
        with torch.inference_mode():
            self._weights = Weights.load(checkpoint, self.config, head=head)
            tiles = plain_tiles()
            counts = sorted({*threads.counts, *counts})
            self._native = chosen(kernel, self.config, counts)
            if exact:
                tiles = check_tiles(self._weights, self.config, counts)
            self._rotation = Rotation(self.config)
        self.tiles: Tiles = tiles
        self._space = Workspace()

    @property
    def kernel(self) -> str:
        """What attends: ``native`` or ``torch``."""
        return "torch" if self._native is None else "native"

    @property
    def attends(self) -> str:
        """The same, the compiled library by its own name."""
        return "torch" if self._native is None else self._native.name

    def new_store(self, slots: int) -> KVStore:
        """An empty store for ``slots`` tokens of this model."""
        with torch.inference_mode():
            return KVStore(self.config, slots)

    def run(self, spans: Sequence[Span], store: KVStore) -> Tensor:
        """Compute new positions, write their KV, return logits.

        Returns float32 (rows asked, vocab) in span order; without a head (rows asked, hidden).
        Raises ValueError for a span whose lengths do not fit together or that exceeds the context.
        """
        self._set_threads(spans)
        with torch.inference_mode():
            plan = self._plan(spans, store)
            hidden = self._blocks(plan, store)
            return self._logits(hidden, _asked(spans, plan))

    def states(self, spans: Sequence[Span], store: KVStore, layers: int) -> Tensor:
        """Like ``run`` up to ``layers``: the residual stream there, each row at root mean square 1.

        Returns float32 (rows asked, hidden) in span order.
        """
        self._set_threads(spans)
        with torch.inference_mode():
            plan = self._plan(spans, store)
            stream = self._blocks(plan, store, layers)
            asked = stream.index_select(0, _asked(spans, plan))
            return normalise(asked, self.config.norm_eps, torch.empty_like(asked))

    def _set_threads(self, spans: Sequence[Span]) -> None:
        count = self.threads.at(sum(len(span.tokens) for span in spans))
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _plan(self, spans: Sequence[Span], store: KVStore) -> Plan:
        longest = max((len(s.slots) for s in spans), default=0)
        if longest > self.config.context:
            raise ValueError(f"spans: {longest} positions; the context is {self.config.context}")
        return build_plan(spans, padding=store.padding, window=self.config.sliding_window)

    def _blocks(self, plan: Plan, store: KVStore, layers: int | None = None) -> Tensor:
        """The residual stream after all layers, or the first ``layers``: (padded rows, hidden) in
        the plan's row order."""
        one = _Pass(plan, store, self.config, self.tiles, self._space, self._native)
        return one.run(self._weights.layers[:layers], self._weights.embedding, self._rotation)

    def _logits(self, stream: Tensor, asked: Tensor) -> Tensor:
        """Final norm, and head if there is one, of the rows ``asked``: a tensor of its own."""
        pieces = cut(len(asked), self.tiles.rows) if len(asked) else [(0, 0)]
        rows = pieces[-1][1]
        wanted = torch.zeros(rows, dtype=torch.int64)
        wanted[: len(asked)] = asked
        last = stream.index_select(0, wanted)
        normal = normalise(last, self.config.norm_eps, torch.empty_like(last))
        if self._weights.head is None:
            return normal.mul_(self._weights.last_norm)[: len(asked)]
        return product(normal, pieces, self._weights.head.times)[: len(asked)]


class _Pass:
    """The layers of one call. Buffers and their views are made once and serve every layer."""

    def __init__(
        self,
        plan: Plan,
        store: KVStore,
        config: ModelConfig,
        tiles: Tiles,
        space: Workspace,
        library: Native | None,
    ) -> None:
        self._plan, self._store, self._eps = plan, store, config.norm_eps
        count, size, kv_heads = len(plan.rows.tokens), config.head_dim, config.kv_heads
        self._count, self._heads, self._turned = count, config.heads, config.heads + kv_heads
        self._tiles = cut(count, tiles.rows)
        self._rows = rows = self._tiles[-1][1]
        self._stream = space.take("stream", rows, config.hidden)
        self._normal = space.take("normal", rows, config.hidden)
        self._turn_scratch = space.take("turn", rows, self._turned, size)
        self._query = space.take("query", count, config.heads, size)
        self._mixed = space.take("attended", rows, config.heads * size)
        self._attended = self._mixed[:count].view(count, config.heads, size)
        self._attention: Attention | NativeAttention
        if library is not None:
            self._attention = NativeAttention(library, plan, config, space)
        else:
            self._attention = Attention(plan, tiles.queries, config, store.rows, space)

    def run(self, layers: Sequence[Layer], embedding: Tensor, rotation: Rotation) -> Tensor:
        """The residual stream (padded rows, hidden) after ``layers``, in the plan's row order."""
        plan, stream = self._plan, self._stream
        torch.index_select(embedding, 0, self._padded(plan.rows.tokens), out=stream)
        turn = rotation.at(self._padded(plan.rows.positions))
        writes = self._store.index(torch.from_numpy(plan.rows.writes))
        for number, layer in enumerate(layers):
            normalise(stream, self._eps, self._normal)
            stream.add_(self._attend(layer, number, turn, writes))
            normalise(stream, self._eps, self._normal)
            gated = product(self._normal, self._tiles, layer.gate.gate)
            gated.mul_(product(self._normal, self._tiles, layer.up.times))
            stream.add_(product(gated, self._tiles, layer.down.times))
        return stream

    def _attend(
        self, layer: Layer, number: int, turn: tuple[Tensor, Tensor], writes: Tensor
    ) -> Tensor:
        """Project, turn, write the new keys and values, attend, project back: (padded rows,
        hidden)."""
        qkv, count = product(self._normal, self._tiles, layer.qkv.times), self._count
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        heads = qkv.view(self._rows, -1, self._query.shape[2])
        turned = heads[:, : self._turned]
        if layer.head_norm is not None:
            normal = normalise(turned, self._eps, self._turn_scratch)
            torch.mul(normal, layer.head_norm, out=turned)
        rotate(turned, *turn, self._turn_scratch)
        store, new = self._store, heads[:count, self._heads :]
        store.both[number].index_copy_(0, writes, new.reshape(len(writes), -1))
        self._query.copy_(heads[:count, : self._heads])
        if store.slice is not None and store.slice.layer == number:
            store.slice.note(torch.from_numpy(self._plan.rows.writes), self._query)
        self._attention.run(self._query, store.keys[number], store.values[number], self._attended)
        added = product(self._mixed, self._tiles, layer.output.times)
        return added if layer.output_bias is None else added.add_(layer.output_bias)

    def _padded(self, ids: NDArray[np.int64]) -> Tensor:
        """``ids`` (rows,) with zeros for the rows that only fill the last tile."""
        padded = torch.zeros(self._rows, dtype=torch.int64)
        padded[: len(ids)] = torch.from_numpy(ids)
        return padded


def _asked(spans: Sequence[Span], plan: Plan) -> Tensor:
    """Rows that get logits, as places in the plan's row order, in span order."""
    new = np.array([len(s.tokens) for s in spans], dtype=np.int64)
    since = np.array([s.logits_from for s in spans], dtype=np.int64)
    within = np.arange(int(new.sum())) - np.repeat(new.cumsum() - new, new)
    place = np.empty_like(plan.rows.order)
    place[plan.rows.order] = np.arange(len(place))
    return torch.from_numpy(place[within >= np.repeat(since, new)])
