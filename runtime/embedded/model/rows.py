"""What a pass does with its rows between the products: by torch, or by the compiled library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.embedded.model.attention import Attention, NativeAttention
from runtime.embedded.model.batch_plan import BatchPlan, KVStore
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import Workspace, normalise, rotate
from runtime.embedded.model.native import Native, Norm, Projection
from runtime.embedded.model.weights import Layer


class TorchRows:
    """Buffers are made once and serve every layer. ``query``: the queries projected last, (rows,
    heads, head_dim), scaled; ``attention`` runs over them."""

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
        self.attention = Attention(plan, sizes, config, store.rows, space)
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


class NativeRows:
    """As ``TorchRows``, in a fraction of the time."""

    def __init__(
        self,
        library: Native,
        plan: BatchPlan,
        turn: tuple[Tensor, Tensor],
        store: KVStore,
        config: ModelConfig,
        space: Workspace,
    ) -> None:
        """``turn``: RoPE of the rows' positions, as ``Rotation.at`` gives it."""
        count = len(plan.rows.tokens)
        self.query = space.take("query", count, config.heads, config.head_dim)
        self._library, self._store = library, store
        self.attention = NativeAttention(library, plan, config, space)
        self._norm = Norm(width=config.hidden, eps=config.norm_eps)
        self._slots, self._turn = plan.rows.writes, turn  # kept while the library reads them
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
        """Make a layer's ``projected`` (rows, heads and twice the key heads) its queries, and new
        keys and values in the store."""
        call, store = self._projection, self._store
        call.projected = projected.data_ptr()
        call.bias = _where(layer.qkv_bias)
        call.scales = _where(layer.head_norm)
        call.keys, call.values = store.keys[number].data_ptr(), store.values[number].data_ptr()
        self._library.project(call)


def _where(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
