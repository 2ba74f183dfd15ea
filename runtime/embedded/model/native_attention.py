"""Attention by the compiled library: every row reads the keys of its blocks where they lie."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import Workspace
from runtime.embedded.model.native import Attending, Native
from runtime.embedded.model.plan import BatchPlan


class NativeAttention:
    """As ``Attention``, with the same bits for a row whatever else is in the call."""

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


def _starts(of: np.ndarray, count: int) -> np.ndarray:
    """Where those of 0, 1, ... begin once they are sorted: (count + 1,)."""
    return np.concatenate(([0], np.bincount(of, minlength=count).cumsum()))
