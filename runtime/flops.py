"""What a forward pass of a model costs, in floating-point operations."""

from __future__ import annotations

from typing import Protocol


class Flops(Protocol):
    """Multiply-adds, counted twice, of a forward pass of one model."""

    def __call__(self, tokens: int, context_sum: int, logits: int | None = None, /) -> float:
        """``tokens`` rows, whose contexts (themselves included) sum to ``context_sum``.

        ``logits``: how many of them pass the model's head, all by default.
        """
        ...


def no_flops(tokens: int, context_sum: int, logits: int | None = None) -> float:
    """The cost of a model whose cost is not known."""
    return 0.0
