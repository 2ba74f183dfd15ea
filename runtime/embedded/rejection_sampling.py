"""Speculative sampling by rejection (Leviathan et al., with several candidates: MCSD, Yang et al.).

Candidates are drawn from the draft's distribution without replacement. Each is accepted with
probability min(1, p(x) / q(x)); after a rejection p becomes what of it exceeds q, and q loses the
candidate. What is drawn has the target's distribution exactly, but which token it is depends on the
draft, and on where there was one: the digest promise does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hedgerow_sglang.noise import gumbel, hashes
from runtime.embedded.sampler import nucleus

Floats = NDArray[np.float64]

CANDIDATES, TRIAL, REST = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
"""Turn a branch's seed into those of the draft's candidates, of the trials and of what is left."""


@dataclass(frozen=True, slots=True)
class CandidateOffer:
    """``candidates`` drawn one after the other, without replacement, from ``q`` (vocab,)."""

    candidates: tuple[int, ...]
    q: Floats


def distribution(logits: NDArray[np.float32], temperature: float, top_p: float) -> Floats:
    """What is sampled from after temperature and top-p: probabilities (vocab,), exactly 0 outside.

    Temperature 0 is the likeliest token alone.
    """
    weight = np.zeros(len(logits))
    if temperature == 0:
        weight[logits.argmax()] = 1.0
        return weight
    tempered = logits.astype(np.float64) / temperature
    kept = nucleus(tempered, top_p) if top_p < 1.0 else np.ones(len(logits), dtype=np.bool_)
    weight[kept] = np.exp(tempered[kept] - tempered.max())
    return weight / weight.sum()


def trials(p: Floats, offer: CandidateOffer) -> tuple[list[float], Floats]:
    """The probability of accepting each candidate once those before it were rejected, and the
    distribution (vocab,) to draw from after the last rejection."""
    p, q, chances = p.copy(), offer.q.copy(), []
    for token in offer.candidates:
        chances.append(min(1.0, p[token] / q[token]))
        if chances[-1] == 1.0:
            break
        p = np.maximum(p - q, 0.0)
        p /= p.sum()
        q[token] = 0.0
        if not q.any():
            break
        q /= q.sum()
    return chances, p


def choose(p: Floats, offer: CandidateOffer, seed: int, position: int) -> int:
    """The token for a position, by noise that follows from the branch's seed and the position."""
    chances, rest = trials(p, offer)
    luck = hashes(np.array([seed ^ TRIAL], np.uint64), [position], len(chances))[0] / 2.0**32
    for token, chance, drawn in zip(offer.candidates, chances, luck, strict=False):
        if drawn < chance:
            return token
    noise = gumbel(np.array([seed ^ REST], np.uint64), [position], len(rest))[0]
    with np.errstate(divide="ignore"):
        return int((np.log(rest) + noise).argmax())


def candidate_seeds(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The draft's own noise for branches with these seeds: independent of their draws'."""
    return np.array([seed ^ CANDIDATES for seed in seeds], dtype=np.uint64)
