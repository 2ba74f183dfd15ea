"""The parts of a layer: a checkpoint's weights as the forward multiplies with them, and row-wise
arithmetic that gives a row the same bits whatever rows are beside it.

Weights are float32 and fused: the scales of norms that feed a projection are folded into it, and so
is attention's 1 / sqrt(head_dim), an exact power of two if head_dim is a power of four. Matrix
products run over fixed row tiles. Elementwise code uses only operations that IEEE 754 rounds
exactly (+ - * / sqrt) and ``exp``, whose vector and remainder paths the self-check compares:
torch's own ``silu`` rounds differently in the remainder of a thread's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from runtime.checkpoint import check_weights
from runtime.embedded.model.config import ModelConfig, UnsupportedModel

PACKED = torch.backends.mkldnn.is_available()
"""Whether oneDNN packs the weights."""
_ROWS = 64  # the row count that the packing expects; the bits do not depend on it
_ROPE_BLOCK = 1024
Multiply = Callable[[Tensor], Tensor]


class Matrix:
    """A float32 weight that maps rows of ``inputs`` numbers to rows of ``outputs`` numbers.

    oneDNN packs a weight once and then gives a row the same bits for any number of rows, at every
    size tried; without oneDNN the product is MKL's or another BLAS's over a plain matrix.
    ``selfcheck`` finds the sizes that give the same bits.
    """

    __slots__ = ("_weight", "inputs", "outputs")

    def __init__(self, weight: Tensor) -> None:
        """``weight``: (outputs, inputs), as in checkpoints."""
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


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. Matrices map rows of their first extent to rows of their second.

    ``qkv`` (hidden, (heads + 2 kv_heads) x head_dim), ``output`` (heads x head_dim, hidden),
    ``gate`` and ``up`` (hidden, ffn), ``down`` (ffn, hidden); ``head_norm`` (heads + kv_heads,
    head_dim): the scales of the norms over query and key heads.
    """

    qkv: Matrix
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model: ``embedding`` (vocab, hidden), ``head`` (hidden, vocab) or None if it was
    not requested, ``last_norm`` (hidden,), which is folded into the head."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    head: Matrix | None
    last_norm: Tensor

    @classmethod
    def load(cls, checkpoint: str | Path, config: ModelConfig, *, head: bool = True) -> Weights:
        """Read ``*.safetensors``. Raises UnsupportedModel if a file or a tensor is missing."""
        read = tensor_reader(Path(checkpoint))
        embedding, last_norm = read("model.embed_tokens.weight"), read("model.norm.weight")
        unembedding = None
        if head:
            unembedding = embedding if config.tied else read("lm_head.weight")
        return cls(
            embedding=embedding,
            layers=tuple(_layer(read, config, i) for i in range(config.layers)),
            head=None if unembedding is None else Matrix(unembedding * last_norm),
            last_norm=last_norm,
        )


def _layer(read: Callable[[str], Tensor], config: ModelConfig, index: int) -> Layer:
    def get(name: str) -> Tensor:
        return read(f"model.layers.{index}.{name}")

    attention_norm, ffn_norm = get("input_layernorm.weight"), get("post_attention_layernorm.weight")
    qkv = torch.cat([get(f"self_attn.{x}_proj.weight") for x in "qkv"])
    bias = head_norm = None
    if config.qkv_bias:
        bias = torch.cat([get(f"self_attn.{x}_proj.bias") for x in "qkv"])
    if config.qk_norm:
        norms = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        counts = torch.tensor([config.heads, config.kv_heads])
        head_norm = torch.stack(norms).repeat_interleave(counts, 0)
    _scale_queries(config, qkv, bias, head_norm)
    return Layer(
        qkv=Matrix(qkv * attention_norm),
        qkv_bias=bias,
        head_norm=head_norm,
        output=Matrix(get("self_attn.o_proj.weight")),
        output_bias=get("self_attn.o_proj.bias") if config.output_bias else None,
        gate=Matrix(get("mlp.gate_proj.weight") * ffn_norm),
        up=Matrix(get("mlp.up_proj.weight") * ffn_norm),
        down=Matrix(get("mlp.down_proj.weight")),
    )


def _scale_queries(
    config: ModelConfig, qkv: Tensor, bias: Tensor | None, head_norm: Tensor | None
) -> None:
    """Scale queries by 1 / sqrt(head_dim), in place: their norm, else projection and bias."""
    scale, rows = config.head_dim**-0.5, config.heads * config.head_dim
    if head_norm is not None:
        head_norm[: config.heads] *= scale
        return
    qkv[:rows] *= scale
    if bias is not None:
        bias[:rows] *= scale


def tensor_reader(checkpoint: Path) -> Callable[[str], Tensor]:
    """A function that reads a tensor, in float32, by name from a folder of safetensors.

    Raises UnsupportedModel without safetensors, ValueError as ``check_weights``; the function
    raises UnsupportedModel for a missing tensor.
    """
    tensors = check_weights(checkpoint)
    if not tensors:
        raise UnsupportedModel(f"{checkpoint}: no model.safetensors; only safetensors are read")

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise UnsupportedModel(f"{checkpoint}: tensor {name} is missing")
        with safe_open(tensors[name].file, "pt") as file:
            return file.get_tensor(name).to(torch.float32)

    return read


class Workspace:
    """Buffers reused between calls, by name. A buffer starts as zeros and grows when needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous float32 tensor of ``shape``, with the contents that its last user left."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.zeros(max(size, 1))
        return buffer[:size].view(shape)


def cut(rows: int, tiles: Sequence[int]) -> list[tuple[int, int]]:
    """Cover at least ``rows`` rows with tiles: (first, last + 1) of each.

    ``tiles``: sizes, descending. The remaining rows take the smallest tile that holds them if they
    fill more than half of it or no smaller tile, else the largest tile that they fill. With empty
    ``tiles`` there is one piece of all rows.
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
    """RMS norm over the last dimension without scales: x / sqrt(mean(x^2) + eps), into ``out``."""
    torch.mul(x, x, out=out)
    scale = out.sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=out)


class Rotation:
    """RoPE's cosines and sines by position, computed in blocks of fixed size when needed."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = _frequencies(config)
        self._cosine = torch.zeros(0, config.head_dim)
        self._sine = torch.zeros(0, config.head_dim)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, (rows, 1, head_dim) each; the sine's first half is negated."""
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
    """RoPE's angular frequencies (head_dim / 2,), with Llama 3's scaling if the config has it."""
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
    """Apply RoPE to ``x`` (rows, heads, head_dim) in place, the halves paired as in Llama."""
    half = x.shape[-1] // 2
    torch.mul(x[..., half:], sine[..., :half], out=scratch[..., :half])
    torch.mul(x[..., :half], sine[..., half:], out=scratch[..., half:])
    x.mul_(cosine).add_(scratch)
