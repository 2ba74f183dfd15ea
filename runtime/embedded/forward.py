"""The embedded engine's forward pass: a Llama-family model over spans of many sequences at once.

Exact mode: a row's logits are the same bits whatever else is in the call, however its prefix was
cut into calls, and with any of the thread counts that the self-check has compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.attention import attend
from runtime.embedded.config import ModelConfig
from runtime.embedded.kernels import Rotation, Workspace, cut, gate, normalise, product, rotate
from runtime.embedded.kv_store import KVStore
from runtime.embedded.plan import Plan, Span, build_plan
from runtime.embedded.selfcheck import Tiles, check_tiles, plain_tiles
from runtime.embedded.weights import Layer, Weights

__all__ = ["Forward", "Span"]


class Forward:
    """A model's weights and its pass. Not thread-safe: one call at a time."""

    def __init__(
        self, checkpoint: str | Path, *, exact: bool = True, threads: int, head: bool = True
    ) -> None:
        """Load ``checkpoint`` in float32 and fix the tiles.

        ``head`` False: for logits, ``run`` gives the hidden state after the final norm.
        ``threads``: torch's threads, set for the whole process. ``exact`` False: one matrix product
        over all rows; results then depend on the batch by some 1e-7.
        """
        if threads < 1:
            raise ValueError(f"threads: {threads}; at least 1 is needed")
        torch.set_num_threads(threads)
        self.config = ModelConfig.from_checkpoint(checkpoint)
        self.exact = exact
        self._threads = threads
        with torch.inference_mode():
            self._weights = Weights.load(checkpoint, self.config, head=head)
            tiles = check_tiles(self._weights, self.config, threads) if exact else plain_tiles()
            self._rotation = Rotation(self.config)
        self.tiles: Tiles = tiles
        self._space = Workspace()

    def new_store(self, slots: int) -> KVStore:
        """An empty store for ``slots`` tokens of this model."""
        with torch.inference_mode():
            return KVStore(self.config, slots)

    def run(self, spans: Sequence[Span], store: KVStore) -> Tensor:
        """Compute new positions, write their KV, return logits.

        Returns float32 (rows asked, vocab) in span order; without a head (rows asked, hidden).
        Raises ValueError for a span whose lengths do not fit together or that exceeds the context.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            plan = self._plan(spans, store)
            hidden = self._blocks(plan, store)
            return self._logits(hidden, _asked(spans, plan))

    def states(self, spans: Sequence[Span], store: KVStore, layers: int) -> Tensor:
        """Like ``run`` up to ``layers``: the residual stream there, each row at root mean square 1.

        Returns float32 (rows asked, hidden) in span order.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            plan = self._plan(spans, store)
            stream = self._blocks(plan, store, layers)
            asked = stream.index_select(0, _asked(spans, plan))
            return normalise(asked, self.config.norm_eps, torch.empty_like(asked))

    def _plan(self, spans: Sequence[Span], store: KVStore) -> Plan:
        longest = max((len(s.slots) for s in spans), default=0)
        if longest > self.config.context:
            raise ValueError(f"spans: {longest} positions; the context is {self.config.context}")
        return build_plan(
            spans,
            padding=store.padding,
            kv_heads=self.config.kv_heads,
            sizes=self.tiles.queries,
            window=self.config.sliding_window,
        )

    def _blocks(self, plan: Plan, store: KVStore, layers: int | None = None) -> Tensor:
        """The residual stream after all layers, or the first ``layers``: (padded rows, hidden) in
        the plan's row order."""
        config, space = self.config, self._space
        count = len(plan.rows.tokens)
        pieces = cut(count, self.tiles.rows)
        rows = pieces[-1][1]
        tokens = np.zeros(rows, dtype=np.int64)
        tokens[:count] = plan.rows.tokens
        positions = np.zeros(rows, dtype=np.int64)
        positions[:count] = plan.rows.positions
        stream = space.take("stream", rows, config.hidden)
        torch.index_select(self._weights.embedding, 0, torch.from_numpy(tokens), out=stream)
        turn = self._rotation.at(torch.from_numpy(positions))
        writes = store.index(torch.from_numpy(plan.rows.writes))
        added = space.take("added", rows, config.hidden)
        normal = space.take("normal", rows, config.hidden)
        for number, layer in enumerate(self._weights.layers[:layers]):
            normalise(stream, config.norm_eps, normal)
            keys, values = store.keys[number], store.values[number]
            mixed = self._attention(layer, normal, turn, writes, keys, values, plan, pieces)
            product(mixed, layer.output, added, pieces)
            if layer.output_bias is not None:
                added.add_(layer.output_bias)
            stream.add_(added)
            normalise(stream, config.norm_eps, normal)
            stream.add_(self._ffn(layer, normal, added, pieces))
        return stream

    def _attention(
        self,
        layer: Layer,
        normal: Tensor,
        turn: tuple[Tensor, Tensor],
        writes: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Plan,
        pieces: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Project, turn, write the new keys and values, attend: (padded rows, heads x head_dim)."""
        config, space = self.config, self._space
        rows, count, size = len(normal), len(plan.rows.tokens), config.head_dim
        both = config.heads + config.kv_heads
        qkv = space.take("qkv", rows, (both + config.kv_heads) * size)
        product(normal, layer.qkv, qkv, pieces)
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        heads = qkv.view(rows, -1, size)
        query = space.take("query", rows, config.heads, size)
        key = space.take("key", rows, config.kv_heads, size)
        self._turn(heads[:, : config.heads], layer.query_norm, turn, query)
        self._turn(heads[:, config.heads : both], layer.key_norm, turn, key)
        query.mul_(size**-0.5)
        keys.index_copy_(0, writes, key[:count].reshape(-1, size))
        values.index_copy_(0, writes, heads[:count, both:].reshape(-1, size))
        mixed = space.take("attended", rows, config.heads * size)
        return attend(query.view(rows, -1), keys, values, plan, mixed, space)

    def _turn(
        self, x: Tensor, norm: Tensor | None, turn: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        """RoPE of ``x`` (rows, heads, head_dim) into ``out``, after its norm where there is one."""
        scratch = self._space.take("turn", *x.shape)
        if norm is not None:
            normal = self._space.take("head_norm", *x.shape)
            x = normalise(x, self.config.norm_eps, normal).mul_(norm)
        rotate(x, *turn, out, scratch)

    def _ffn(
        self, layer: Layer, normal: Tensor, out: Tensor, pieces: Sequence[tuple[int, int]]
    ) -> Tensor:
        rows, ffn, space = len(normal), self.config.ffn, self._space
        gate_up = product(normal, layer.gate_up, space.take("gate_up", rows, 2 * ffn), pieces)
        gated = gate(gate_up, space.take("gated", rows, ffn), space.take("gate", rows, ffn))
        return product(gated, layer.down, out, pieces)

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
        logits = torch.empty(rows, self.config.vocab)
        return product(normal, self._weights.head, logits, pieces)[: len(asked)]


def _asked(spans: Sequence[Span], plan: Plan) -> Tensor:
    """Rows that get logits, as places in the plan's row order, in span order."""
    new = np.array([len(s.tokens) for s in spans], dtype=np.int64)
    since = np.array([s.logits_from for s in spans], dtype=np.int64)
    within = np.arange(int(new.sum())) - np.repeat(new.cumsum() - new, new)
    place = np.empty_like(plan.rows.order)
    place[plan.rows.order] = np.arange(len(place))
    return torch.from_numpy(place[within >= np.repeat(since, new)])
