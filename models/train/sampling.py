"""Batched sampling at temperature 1 from a policy, for training data and measurements.

Rows are left-padded: rotary positions are relative, so a common offset changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train.network import COMPUTE, decoder_layers, normed, rotate, rotation

ROWS, GPU_ROWS = 192, 4096
ROOM = 640
"""The most tokens a row may have, prompt and reply together."""
COMPACT_SHARE = 0.75
NEVER = -1e9


@dataclass
class _Layer:
    """One layer's fused weights."""

    block: Any
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class _Rows:
    """The rows still being written: their keys and values, padding mask and place in the result."""

    keys: list[Tensor]
    values: list[Tensor]
    bias: Tensor
    last: Tensor
    place: Tensor

    def keep(self, mask: Tensor) -> None:
        """Keep only the rows that `mask` marks."""
        self.keys = [key[mask] for key in self.keys]
        self.values = [value[mask] for value in self.values]
        self.bias, self.last, self.place = (
            self.bias[mask],
            self.last[mask],
            self.place[mask],
        )


class Sampler:
    """Draws replies from one model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.config: Any = model.config
        self.device: torch.device = model.device
        self.rows = GPU_ROWS if self.device.type == "cuda" else ROWS
        self.embed = model.model.embed_tokens.weight.detach().to(COMPUTE)
        self.norm: Any = model.model.norm
        self.layers = [self._fuse(layer) for layer in decoder_layers(model)]
        self.cos, self.sin = (
            part.to(COMPUTE) for part in rotation(ROOM, self.config.head_dim, self.device)
        )

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        weights = (
            torch.cat(qkv),
            attention.o_proj.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        )
        return _Layer(layer, *(weight.detach().to(COMPUTE) for weight in weights))

    def sample(
        self,
        prompts: list[list[int]],
        seed: int,
        room: int = ROOM,
        stops: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """One reply for each prompt, in order; it ends with the end token unless `room` ran out,
        or with one of `stops`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        ends = stops | {self.config.eos_token_id}
        replies: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), self.rows):
            places = order[start : start + self.rows]
            for place, reply in self._batch(prompts, places, generator, room, ends):
                replies[place] = reply
        return replies

    @torch.no_grad()
    def _batch(
        self,
        prompts: list[list[int]],
        places: list[int],
        generator: torch.Generator,
        room: int,
        ends: frozenset[int],
    ) -> Iterator[tuple[int, list[int]]]:
        width = max(len(prompts[i]) for i in places)
        rows = self._begin(prompts, places, width)
        replies: dict[int, list[int]] = {i: [] for i in places}
        logits = self._forward(rows, self._ids(prompts, places, width), 0)
        for position in range(width, room + 1):
            rows.last = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            for place, token in zip(rows.place.tolist(), rows.last.tolist(), strict=True):
                if not replies[place] or replies[place][-1] not in ends:
                    replies[place].append(token)
            open_rows = torch.tensor([replies[i][-1] not in ends for i in rows.place.tolist()])
            if position == room or not open_rows.any():
                break
            if open_rows.float().mean() < COMPACT_SHARE:
                rows.keep(open_rows.to(self.device))
            logits = self._forward(rows, rows.last[:, None], position)
        yield from replies.items()

    def _ids(self, prompts: list[list[int]], places: list[int], width: int) -> Tensor:
        pad = self.config.pad_token_id
        rows = [[pad] * (width - len(prompts[i])) + prompts[i] for i in places]
        return torch.tensor(rows, device=self.device)

    def _begin(self, prompts: list[list[int]], places: list[int], width: int) -> _Rows:
        shape = (len(places), self.config.num_key_value_heads, ROOM, self.config.head_dim)
        count = len(self.layers)
        bias = torch.zeros(len(places), ROOM)
        for row, i in enumerate(places):
            bias[row, : width - len(prompts[i])] = NEVER
        return _Rows(
            [torch.zeros(shape, dtype=COMPUTE, device=self.device) for _ in range(count)],
            [torch.zeros(shape, dtype=COMPUTE, device=self.device) for _ in range(count)],
            bias.to(self.device),
            torch.zeros(len(places), dtype=torch.long, device=self.device),
            torch.tensor(places, device=self.device),
        )

    def _forward(self, rows: _Rows, ids: Tensor, start: int) -> Tensor:
        """Logits at the last position of `ids`, which stand at positions from `start` on."""
        x = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            h = normed(x, layer.block.input_layernorm)
            x = x + F.linear(self._attend(rows, i, F.linear(h, layer.qkv), start), layer.out)
            h = normed(x, layer.block.post_attention_layernorm)
            gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(normed(x[:, -1], self.norm), self.embed).float()

    def _attend(self, rows: _Rows, i: int, qkv: Tensor, start: int) -> Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        batch, length, _ = qkv.shape
        stop = start + length
        split = qkv.view(batch, length, heads + 2 * kv_heads, -1).transpose(1, 2)
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        turned = rotate(split[:, : heads + kv_heads], cos, sin)
        rows.keys[i][:, :, start:stop] = turned[:, heads:]
        rows.values[i][:, :, start:stop] = split[:, heads + kv_heads :]
        bias = rows.bias[:, None, None, :stop]
        if length > 1:
            future = torch.full((length, stop), NEVER, device=self.device).triu(1 + start)
            bias = bias + future
        group = heads // kv_heads
        query = turned[:, :heads].reshape(batch, kv_heads, group, length, -1).flatten(2, 3)
        scores = query @ rows.keys[i][:, :, :stop].transpose(2, 3)
        scores = scores * self.config.head_dim**-0.5
        scores = scores.view(batch, heads, length, stop) + bias.to(COMPUTE)
        weights = scores.softmax(-1).view(batch, kv_heads, group * length, stop)
        mixed = (weights @ rows.values[i][:, :, :stop]).view(batch, heads, length, -1)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
