"""Seeded sampling in SGLang without its deterministic mode: the embedded engine's own draw.

A token is the argmax over v of log p(v) + Gumbel(seed, position, v), with p after temperature and
within the nucleus, at the position of the token drawn: ``hedgerow_sglang.noise``, as in the
embedded engine's sampler. Only the models' arithmetic differs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hedgerow_sglang import noise
from hedgerow_sglang.chain_seeds import chain_seed
from hedgerow_sglang.gumbel_max import HASHES, LIKELY, MARGIN, SLACK, SPREAD
from hedgerow_sglang.noise import BLOCK, blocks

DEVICE_BLOCK = 1 << 22
"""Probabilities that a GPU processes together; their hashes take most of the memory needed."""
_LEAST = torch.finfo(torch.float64).min
_MOST_LOG = -(2.0**-32)


def seeded_batch(info: Any, _: type, batch: Any, *__: Any) -> None:
    """After ``SamplingBatchInfo.from_schedule_batch``: give every row a seed.

    Batches are merged, which needs seeds on both sides. A request that names none gets one from its
    id: SGLang draws ids at random, and every rank of a server has the same.
    """
    if info.sampling_seed is None:
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)


def sample(probs: Tensor, info: Any, positions: Tensor) -> Tensor:
    """Tokens (rows,), int32, drawn by seed from ``probs`` (rows, vocab), temperature applied.

    ``info``: SGLang's ``SamplingBatchInfo``. ``positions`` (rows,): of the last token read, as its
    sampler has them. The extra memory is bounded, however large ``probs`` is.
    """
    truncates = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    tokens = torch.empty(len(probs), dtype=torch.int32, device=probs.device)
    for rows in blocks(len(probs), probs.shape[1], BLOCK if probs.is_cpu else DEVICE_BLOCK):
        block, seeds, at = probs[rows], info.sampling_seed[rows], positions[rows] + 1
        if truncates:
            nucleus = truncated(
                block.double(), info.top_ks[rows], info.top_ps[rows], info.min_ps[rows]
            )
            tokens[rows] = _draw_among(block, *nucleus, seeds, at)
        else:
            tokens[rows] = _draw(block, hashes(seeds, at, probs.shape[1]))
    return tokens


def _draw_among(
    probs: Tensor, row: Tensor, token: Tensor, whole: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """argmax of log p + Gumbel noise over the given tokens, or over all in ``whole`` rows."""
    if probs.is_cpu:
        words = noise.hashes_of(
            seeds[row].numpy().astype(np.uint64), positions[row].numpy(), token.numpy()
        )
        hashed = torch.from_numpy(words.astype(np.int64))
    else:
        hashed = hashes(seeds, positions, probs.shape[1])[row, token]
    likeliest = probs.argmax(-1)
    scores = _scores(probs[row, token], hashed)
    least = torch.full_like(likeliest, -torch.inf, dtype=torch.float64)
    winners = _first(likeliest, row, token, scores, least)
    if whole.any():
        whole_hashes = hashes(seeds[whole], positions[whole], probs.shape[1])
        winners[whole] = _draw(probs[whole], whole_hashes)
    return winners


def _draw(probs: Tensor, hashed: Tensor) -> Tensor:
    """argmax of log p + Gumbel noise, ids (rows,): ``gumbel_max`` of probabilities, by torch."""
    likeliest = probs.argmax(-1, keepdim=True)
    values = _scores(probs.gather(1, likeliest), hashed.gather(1, likeliest))
    room = probs * (SPREAD * torch.exp(-values)).float()
    near = (HASHES - hashed).float() <= room + SLACK
    row, token = _places(near & (probs > 0))
    scores = _scores(probs[row, token], hashed[row, token])
    return _first(likeliest.flatten(), row, token, scores, values.flatten())


def _first(fallback: Tensor, row: Tensor, token: Tensor, scores: Tensor, least: Tensor) -> Tensor:
    """Each row's token with the highest score, ties by lower id; ``fallback`` where no score is
    ``least`` or more. (rows,)"""
    best = least.scatter_reduce(0, row, scores, "amax")
    won = scores == best[row]
    return fallback.scatter_reduce(0, row[won], token[won], "amin", include_self=False)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the True entries, which are few."""
    if mask.is_cpu:  # NumPy takes a tenth of torch's time
        row, token = np.divmod(np.flatnonzero(mask.numpy()), mask.shape[1])
        return torch.from_numpy(row), torch.from_numpy(token)
    row, token = mask.nonzero(as_tuple=True)
    return row, token


def _scores(probs: Tensor, hashed: Tensor) -> Tensor:
    """log p + noise in float64."""
    return probs.double().log() + gumbel_of(hashed)


def truncated(
    probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and ids of the tokens that may be drawn, ties by lower id; and the rows, bool (rows,),
    in which all tokens may be drawn, whose tokens are not among the former.

    Per row at most ``top_ks`` (1: greedy), the fewest that reach ``top_ps``, and only those with at
    least ``min_ps`` times the top probability; each (rows,). ``probs`` in float64.
    """
    most = probs.amax(-1, keepdim=True)
    least = min_ps.to(probs.dtype).view(-1, 1) * most
    total = probs.sum(-1, keepdim=True)
    target = (total * top_ps.to(probs.dtype).view(-1, 1)).where(top_ps.view(-1, 1) < 1, torch.inf)
    # all tokens below this floor together hold less than total - target, so none of them is kept
    floor = (total - target).clamp(min=0.0) / probs.shape[1] * (1 - 1e-6)
    floor = torch.maximum(torch.maximum(least, floor), _last_of(probs, top_ks))
    for bound in (likely * most for likely in LIKELY):
        mass = probs.where(probs >= bound, 0.0).sum(-1, keepdim=True)
        enough = mass > target * (1 + MARGIN)
        floor = torch.maximum(floor, bound.where(enough, 0.0))
        if (enough | target.isinf()).all():
            break
    row, token = _places((probs >= floor) & (floor > 0))
    counts = torch.bincount(row, minlength=len(probs))
    place = torch.arange(len(row), device=probs.device) - (counts.cumsum(0) - counts)[row]
    packed = probs.new_zeros((len(probs), int(counts.max())))
    packed[row, place] = probs[row, token]
    falling, order = packed.sort(dim=-1, descending=True, stable=True)
    before = falling.cumsum(-1) - falling
    rank = torch.arange(packed.shape[1], device=probs.device)
    mask = (rank < top_ks.view(-1, 1)) & (before < target) & (falling >= least)
    mask = torch.zeros_like(mask).scatter(-1, order, mask)[row, place]
    return row[mask], token[mask], floor.flatten() == 0


def _last_of(probs: Tensor, top_ks: Tensor) -> Tensor:
    """The probability of each row's ``top_ks``-th likeliest token, 0 without a limit: (rows, 1)."""
    few = top_ks < probs.shape[1]
    if not few.any():
        return probs.new_zeros((len(probs), 1))
    most = int(top_ks[few].max())
    place = top_ks.clamp(1, most).to(torch.int64).view(-1, 1) - 1
    return probs.topk(most).values.gather(1, place).where(few.view(-1, 1), 0.0)


def hashes(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """``noise.hashes`` of signed 64-bit seeds (rows,), on their device: int64 (rows, vocab)."""
    if seeds.is_cpu:
        unsigned = seeds.numpy().astype(np.uint64)
        return torch.from_numpy(noise.hashes(unsigned, positions.numpy(), vocab).astype(np.int64))
    from sglang.srt.layers.sampler import (  # pyright: ignore[reportMissingImports]
        murmur_hash32,
    )

    columns = torch.arange(vocab, device=seeds.device)
    return murmur_hash32(seeds.view(torch.uint64), positions, columns).to(torch.int64)


def gumbel_of(hashed: Tensor) -> Tensor:
    """``noise.gumbel_of``, on the hashes' device."""
    if hashed.is_cpu:
        return torch.from_numpy(noise.gumbel_of(hashed.numpy().astype(np.uint32)))
    variates = hashed.to(torch.float64) / (2**32 - 1)
    variates.log_().clamp_(min=_LEAST, max=_MOST_LOG).neg_()
    return variates.log_().neg_()


def _seed_of(request: Any) -> int:
    seed = chain_seed(request)
    if seed is not None:
        return seed
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return seed - (1 << 64) if seed >= 1 << 63 else seed  # routers send seeds unsigned
    digest = hashlib.blake2b(request.rid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
