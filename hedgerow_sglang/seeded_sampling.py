"""Seeded sampling in SGLang without its deterministic mode: the embedded engine's own draw.

A token is the argmax over v of log p(v) + Gumbel(seed, position, v), with p after temperature and
within the nucleus, at the position of the token drawn: ``hedgerow_sglang.noise`` and the embedded
engine's sampler in another process. What differs is the model's arithmetic alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hedgerow_sglang.noise import gumbel

_LEAST = torch.finfo(torch.float64).min
_MOST_LOG = -(2.0**-32)


def seeded_batch(original: Callable[..., Any], cls: type, batch: Any, *args: Any) -> Any:
    """Around ``SamplingBatchInfo.from_schedule_batch``: every row has a seed.

    Batches are merged, and both sides need one. A request that names none gets one from its id:
    SGLang draws ids at random, and every rank of a server knows the same.
    """
    info = original(cls, batch, *args)
    if info.sampling_seed is None:
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)
    return info


def sample(probs: Tensor, info: Any, positions: Tensor) -> Tensor:
    """Tokens (rows,), int32, drawn by seed from ``probs`` (rows, vocab), temperature applied.

    ``info``: SGLang's ``SamplingBatchInfo``. ``positions`` (rows,): of the last token read, as its
    sampler has them.
    """
    logprobs = probs.to(torch.float64)
    if info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling:
        kept = truncated(logprobs, info.top_ks, info.top_ps, info.min_ps)
        logprobs = logprobs.masked_fill(~kept, 0.0)
    logprobs = logprobs.log()
    logprobs += noise(info.sampling_seed, positions + 1, probs.shape[1])
    return logprobs.argmax(-1).to(torch.int32)


def truncated(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Which tokens may be drawn, bool (rows, vocab): the likeliest ones, equals by id.

    ``top_ks`` of them at most (1: greedy), the fewest that reach ``top_ps``, those with at least
    ``min_ps`` times the likeliest one's probability; each (rows,). ``probs`` in float64.
    """
    falling, order = probs.sort(dim=-1, descending=True, stable=True)
    before = falling.cumsum(-1) - falling
    total = before[:, -1:] + falling[:, -1:]
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = rank < top_ks.view(-1, 1)
    kept &= before < top_ps.view(-1, 1).to(probs.dtype) * total
    kept &= falling >= min_ps.view(-1, 1).to(probs.dtype) * falling[:, :1]
    return torch.zeros_like(kept).scatter(-1, order, kept)


def noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """``gumbel`` of signed 64-bit seeds (rows,), on their device: (rows, vocab)."""
    if seeds.device.type == "cpu":
        unsigned = seeds.numpy().astype(np.uint64)
        return torch.from_numpy(gumbel(unsigned, positions.numpy(), vocab))
    from sglang.srt.layers.sampler import (  # pyright: ignore[reportMissingImports]
        murmur_hash32,
    )

    columns = torch.arange(vocab, device=seeds.device)
    hashed = murmur_hash32(seeds.view(torch.uint64), positions, columns)
    drawn = hashed.to(torch.float64) / (2**32 - 1)
    drawn.log_().clamp_(min=_LEAST, max=_MOST_LOG).neg_()
    return drawn.log_().neg_()


def _seed_of(request: Any) -> int:
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return seed
    digest = hashlib.blake2b(request.rid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
