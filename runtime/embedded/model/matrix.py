"""A weight that rows are multiplied with, laid out as this machine multiplies it fastest.

oneDNN packs a weight once and then gives a row the same bits whatever number of rows it is
multiplied with, at every size tried; elsewhere it is MKL's or another BLAS's product over a plain
matrix. Which sizes hold is for ``selfcheck`` to find.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = torch.backends.mkldnn.is_available()
"""Whether weights are packed by oneDNN."""
_ROWS = 64  # that the packing expects; the bits do not depend on it


class Matrix:
    """A weight in float32, taking rows of ``inputs`` numbers to rows of ``outputs``."""

    __slots__ = ("_weight", "inputs", "outputs")

    def __init__(self, weight: Tensor) -> None:
        """``weight`` (outputs, inputs), as checkpoints have it."""
        self.outputs, self.inputs = weight.shape
        if PACKED:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        else:
            self._weight = weight.t().contiguous()

    def times(self, rows: Tensor) -> Tensor:
        """``rows`` (n, inputs) multiplied: a new tensor (n, outputs)."""
        if PACKED:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "")
        return torch.mm(rows, self._weight)

    def gate(self, rows: Tensor) -> Tensor:
        """``rows`` multiplied, then a / (1 + e^-a) of every number a: a new tensor (n, outputs)."""
        if PACKED:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "swish", [], "")
        gates = torch.mm(rows, self._weight)
        return gates.div_(torch.neg(gates).exp_().add_(1.0))
