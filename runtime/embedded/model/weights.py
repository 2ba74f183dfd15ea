"""A checkpoint's weights in the layout the forward multiplies with: float32, fused, norms folded.

Scales of norms that feed a projection are folded into it, and so is attention's 1 / sqrt(head_dim),
an exact power of two where head_dim is one of four.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from runtime.embedded.model.config import ModelConfig, UnsupportedModel

PACKED = torch.backends.mkldnn.is_available()
"""Whether weights are packed by oneDNN."""
_ROWS = 64  # that the packing expects; the bits do not depend on it


class Matrix:
    """A weight in float32, taking rows of ``inputs`` numbers to rows of ``outputs``.

    oneDNN packs a weight once and then gives a row the same bits whatever number of rows it is
    multiplied with, at every size tried; elsewhere it is MKL's or another BLAS's product over a
    plain matrix. Which sizes hold is for ``selfcheck`` to find.
    """

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


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Matrices take rows of their first to rows of their second extent.

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
    """The whole model: ``embedding`` (vocab, hidden), ``head`` (hidden, vocab) or None if it is not
    wanted, ``last_norm`` (hidden,), which is folded into the head."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    head: Matrix | None
    last_norm: Tensor

    @classmethod
    def load(cls, checkpoint: str | Path, config: ModelConfig, *, head: bool = True) -> Weights:
        """Read ``*.safetensors``. Raises UnsupportedModel where a file or a tensor is missing."""
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
    """Multiply by 1 / sqrt(head_dim), in place, whatever decides a query's length."""
    scale, rows = config.head_dim**-0.5, config.heads * config.head_dim
    if head_norm is not None:
        head_norm[: config.heads] *= scale
        return
    qkv[:rows] *= scale
    if bias is not None:
        bias[:rows] *= scale


def tensor_reader(checkpoint: Path) -> Callable[[str], Tensor]:
    """A function from a tensor's name to the tensor in float32, of a folder of safetensors.

    Both raise UnsupportedModel for what is not there.
    """
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif (checkpoint / "model.safetensors").is_file():
        with safe_open(checkpoint / "model.safetensors", "pt") as opened:
            files = dict.fromkeys(opened.keys(), "model.safetensors")
    else:
        raise UnsupportedModel(f"{checkpoint}: no model.safetensors; only safetensors are read")

    def read(name: str) -> Tensor:
        if name not in files:
            raise UnsupportedModel(f"{checkpoint}: tensor {name} is missing")
        with safe_open(checkpoint / files[name], "pt") as opened:
            return opened.get_tensor(name).to(torch.float32)

    return read
