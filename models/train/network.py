"""The bundled models' shapes and a fast training forward over their parameters.

The parameters are those of `transformers.LlamaForCausalLM`; the forward here computes the same
function in bf16 with fewer, larger operations (plain causal attention over short rows beats the
fused kernel by three times on a CPU; on a GPU the fused one is used).
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from models.train.tokenizer import END, PAD

ROPE_BASE = 10_000.0
CONTEXT = 1024
_HAS_BF16 = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
COMPUTE = torch.bfloat16 if _HAS_BF16 else torch.float32
"""Processors without bf16 emulate it, a hundred times slower than float32."""

SHAPES: dict[str, dict[str, Any]] = {
    "policy": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
               "num_attention_heads": 4, "num_key_value_heads": 2},
    "draft": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2,
              "num_attention_heads": 3, "num_key_value_heads": 1},
}  # fmt: skip


def decoder_layers(model: LlamaForCausalLM) -> list[Any]:
    """The layers; transformers leaves the types of their parts open."""
    return list(model.model.layers)


def new_model(shape: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A new model; its projections into the residual stream start at zero."""
    torch.manual_seed(seed)
    (end,), (pad,) = tokenizer.encode(END), tokenizer.encode(PAD)
    config = LlamaConfig(
        **SHAPES[shape],
        head_dim=64,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    for layer in decoder_layers(model):
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


@lru_cache(maxsize=256)
def rotation(
    length: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_dim) of the rotary positions."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(length)[:, None] * frequency
    angle = torch.cat([angle, angle], -1).to(device)
    return angle.cos(), angle.sin()


@lru_cache(maxsize=256)
def _causal_mask(length: int) -> Tensor:
    return torch.full((length, length), -1e9, dtype=COMPUTE).triu(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attention(layer: Any, config: Any, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    block = layer.self_attn
    fused = torch.cat([block.q_proj.weight, block.k_proj.weight, block.v_proj.weight])
    rows = F.linear(x, fused.to(COMPUTE)).view(batch, length, heads + 2 * kv_heads, dim)
    rows = rows.transpose(1, 2)
    cos, sin = rotation(length, dim, x.device)
    turned = rotate(rows[:, : heads + kv_heads], cos.to(COMPUTE), sin.to(COMPUTE))
    query, key = turned.split([heads, kv_heads], 1)
    group = heads // kv_heads
    key = key.repeat_interleave(group, 1)
    value = rows[:, heads + kv_heads :].repeat_interleave(group, 1)
    if x.is_cuda:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        mixed = _plain_attention(query, key, value)
    mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
    return F.linear(mixed, block.o_proj.weight.to(COMPUTE))


def _plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, length, dim = query.shape
    query, key, value = (part.reshape(batch * heads, length, dim) for part in (query, key, value))
    mask = _causal_mask(length).expand(batch * heads, length, length)
    scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), value).view(batch, heads, length, dim)


def normed(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm by one of the model's norms."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight.to(COMPUTE), norm.variance_epsilon)


def streams(model: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    """The residual stream (batch, length, width) of right-padded rows after every layer."""
    config = model.config
    x = F.embedding(ids, model.model.embed_tokens.weight).to(COMPUTE)
    after = []
    for layer in decoder_layers(model):
        x = x + _attention(layer, config, normed(x, layer.input_layernorm))
        h = normed(x, layer.post_attention_layernorm)
        fused = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).to(COMPUTE)
        gate, up = F.linear(h, fused).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight.to(COMPUTE))
        after.append(x)
    return after


def read_out(model: LlamaForCausalLM, stream: Tensor) -> Tensor:
    """Float32 logits of positions (n, width) of a stream."""
    states = normed(stream, model.model.norm)
    return F.linear(states, model.model.embed_tokens.weight.to(COMPUTE)).float()


def logits_at(model: LlamaForCausalLM, ids: Tensor, where: Tensor) -> Tensor:
    """Float32 logits at the positions where the boolean mask `where` (batch, length) holds."""
    return read_out(model, streams(model, ids)[-1][where])
