"""The row-wise arithmetic of the forward, each piece the same bits whatever rows stand beside it.

Matrix products run over fixed row tiles. What is elementwise uses only operations that IEEE 754
rounds exactly (+ - * / sqrt) and ``exp``, whose vector and remainder paths the self-check compares:
torch's own ``silu`` rounds differently in the remainder of a thread's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.model.config import ModelConfig

_ROPE_BLOCK = 1024
Multiply = Callable[[Tensor], Tensor]


class Workspace:
    """Buffers reused between calls, by name. A buffer starts as zeros and grows when needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous float32 tensor of ``shape``; holds whatever its last user left there."""
        size = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            held = self._buffers[name] = torch.zeros(max(size, 1))
        return held[:size].view(shape)


def cut(rows: int, tiles: Sequence[int]) -> list[tuple[int, int]]:
    """Cover at least ``rows`` rows with tiles: (first, last + 1) of each.

    ``tiles`` descends. A rest takes the smallest tile that holds it, if it is more than half of
    that or there is no smaller one, and else the largest that it fills. An empty ``tiles`` gives
    one piece of all rows.
    """
    if not tiles:
        return [(0, rows)]
    pieces, start = [], 0
    while (rest := rows - start) > 0:
        full = next((tile for tile in tiles if tile <= rest), 0)
        holds = next((tile for tile in reversed(tiles) if tile >= rest), 0)
        tile = holds if holds and (rest > holds // 2 or not full) else full
        pieces.append((start, start + tile))
        start += tile
    return pieces


def product(x: Tensor, tiles: Sequence[tuple[int, int]], multiply: Multiply) -> Tensor:
    """The rows of ``x`` (rows, inputs) multiplied tile by tile: a new tensor (rows, outputs).

    ``multiply``: ``times`` or ``gate`` of a ``Matrix``.
    """
    if len(tiles) == 1:
        return multiply(x)
    return torch.cat([multiply(x[start:end]) for start, end in tiles])


def normalise(x: Tensor, eps: float, out: Tensor) -> Tensor:
    """RMS norm over the last dimension, without its scale: x / sqrt(mean(x^2) + eps)."""
    torch.mul(x, x, out=out)
    scale = out.sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=out)


class Rotation:
    """RoPE's cosines and sines by position, computed in blocks of fixed size as positions come."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = _frequencies(config)
        self._cosine = torch.zeros(0, config.head_dim)
        self._sine = torch.zeros(0, config.head_dim)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, (rows, 1, head_dim) each; sin's first half is negated."""
        highest = int(positions.max())
        while highest >= self._cosine.shape[0]:
            self._grow()
        cosine, sine = self._cosine[positions], self._sine[positions]
        return cosine[:, None], sine[:, None]

    def _grow(self) -> None:
        start = self._cosine.shape[0]
        positions = torch.arange(start, start + _ROPE_BLOCK, dtype=torch.float32)
        angle = (positions[:, None] * self._frequencies).numpy().astype(np.float64)
        cosine = torch.from_numpy(np.cos(angle).astype(np.float32))
        sine = torch.from_numpy(np.sin(angle).astype(np.float32))
        self._cosine = torch.cat([self._cosine, torch.cat([cosine, cosine], -1)])
        self._sine = torch.cat([self._sine, torch.cat([-sine, sine], -1)])


def _frequencies(config: ModelConfig) -> Tensor:
    """RoPE's angular frequencies (head_dim / 2,), stretched as Llama 3 does where asked."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    wavelength = 2 * math.pi / plain
    blend = (scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, scratch: Tensor) -> None:
    """RoPE of ``x`` (rows, heads, head_dim) in place, the halves paired as in Llama."""
    half = x.shape[-1] // 2
    torch.mul(x[..., half:], sine[..., :half], out=scratch[..., :half])
    torch.mul(x[..., :half], sine[..., half:], out=scratch[..., half:])
    x.mul_(cosine).add_(scratch)
