"""What a pass does with its rows between the products, by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.embedded.model.attention import Attention
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import Workspace, normalise, rotate
from runtime.embedded.model.kv_store import KVStore
from runtime.embedded.model.plan import BatchPlan
from runtime.embedded.model.weights import Layer


class TorchRows:
    """Buffers are made once and serve every layer. ``query``: the queries projected last, (rows,
    heads, head_dim), scaled."""

    def __init__(
        self,
        plan: BatchPlan,
        sizes: Sequence[int],
        turn: tuple[Tensor, Tensor],
        store: KVStore,
        config: ModelConfig,
        space: Workspace,
    ) -> None:
        """``sizes``: rows of a tile of attention; ``turn``: RoPE of the rows' positions, padding
        included, as ``Rotation.at`` gives it."""
        self._count, self._heads = len(plan.rows.tokens), config.heads
        self._turned, self._eps = config.heads + config.kv_heads, config.norm_eps
        self.query = space.take("query", self._count, config.heads, config.head_dim)
        self._scratch = space.take("turn", len(turn[0]), self._turned, config.head_dim)
        self._store, self._writes = store, store.index(torch.from_numpy(plan.rows.writes))
        self._attention = Attention(plan, sizes, config, store.rows, space)
        self._turn = turn

    def normalise(self, stream: Tensor, added: Tensor | None, out: Tensor) -> None:
        """Add to the residual stream and norm its rows into ``out``, all (rows, hidden)."""
        if added is not None:
            stream.add_(added)
        normalise(stream, self._eps, out)

    def project(self, projected: Tensor, layer: Layer, number: int) -> None:
        """Make a layer's ``projected`` (rows, heads and twice the key heads) its queries, and new
        keys and values in the store."""
        if layer.qkv_bias is not None:
            projected.add_(layer.qkv_bias)
        heads = projected.view(len(projected), -1, self.query.shape[2])
        turned = heads[:, : self._turned]
        if layer.head_norm is not None:
            normal = normalise(turned, self._eps, self._scratch)
            torch.mul(normal, layer.head_norm, out=turned)
        rotate(turned, *self._turn, self._scratch)
        new = heads[: self._count, self._heads :].reshape(len(self._writes), -1)
        self._store.both[number].index_copy_(0, self._writes, new)
        self.query.copy_(heads[: self._count, : self._heads])

    def attend(self, number: int, out: Tensor) -> None:
        """Fill ``out`` (rows, heads, head_dim) by the queries projected last."""
        store = self._store
        self._attention.run(self.query, store.keys[number], store.values[number], out)
