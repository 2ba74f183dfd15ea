"""Drawing tokens by coupled noise, and what is known of each draw.

Float64 throughout, every draw by itself: its token, log-probability and entropy are the same bits
whatever is drawn beside it. Samples from one row share its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hedgerow_sglang.noise import gumbel

Floats = NDArray[np.float64]


class Samples(NamedTuple):
    """One of each for every draw, (draws,).

    ``tokens`` int64 ids; ``logprobs`` the token's natural log-probability and ``entropies`` the
    Shannon entropy in nats, both of the untempered, untruncated distribution.
    """

    tokens: NDArray[np.int64]
    logprobs: Floats
    entropies: Floats


def sample(
    logits: Tensor | NDArray[np.float32],
    seeds: Sequence[int] | NDArray[np.uint64],
    positions: Sequence[int] | NDArray[np.int64],
    temperature: ArrayLike = 1.0,
    top_p: ArrayLike = 1.0,
    rows: Sequence[int] | NDArray[np.int64] | None = None,
) -> Samples:
    """Draw tokens from ``logits`` (rows, vocab): one from each row, or one from each of ``rows``,
    which may name a row for several draws.

    token = argmax over v of log p(v) / temperature + Gumbel(seed, position, v), over the tokens
    that top-p keeps; ties go to the lower id. ``seeds`` in [0, 2^64); ``positions``: the absolute
    position of the token drawn. ``temperature`` and ``top_p``: one for all or one a draw;
    temperature 0 takes the likeliest token. Raises ValueError for values out of range and
    FloatingPointError for logits that are not finite.
    """
    values = logits.numpy() if isinstance(logits, Tensor) else logits
    each = np.arange(len(values))
    of = each if rows is None else np.asarray(rows, dtype=np.int64)
    heat = _per_draw("temperature", temperature, len(of))
    mass = _per_draw("top_p", top_p, len(of))
    if (heat < 0).any():
        raise ValueError(f"temperature: {heat.min()}; at least 0 is needed")
    if ((mass <= 0) | (mass > 1)).any():
        raise ValueError(f"top_p: {mass}; more than 0 and at most 1 is allowed")
    logprobs, entropies = _log_softmax(values.astype(np.float64))
    tokens = values.argmax(-1)[of]
    warm = np.flatnonzero(heat > 0)
    if len(warm):
        picked = logprobs if np.array_equal(of[warm], each) else logprobs[of[warm]]
        noise = gumbel(
            np.asarray(seeds, np.uint64)[warm], np.asarray(positions)[warm], values.shape[1]
        )
        tokens[warm] = _perturbed_argmax(picked, noise, heat[warm], mass[warm])
    return Samples(tokens, logprobs[of, tokens], entropies[of])


def rank_candidates(
    logits: Tensor | NDArray[np.float32],
    seeds: Sequence[int] | NDArray[np.uint64],
    positions: Sequence[int] | NDArray[np.int64],
    temperature: Floats,
    top_p: Floats,
    count: int,
) -> NDArray[np.int64]:
    """What ``draw`` would draw, and what after that: int64 (rows, count), the likeliest first.

    Arguments as of ``draw``, one temperature and top-p a row. -1 fills up where top-p leaves fewer.
    """
    values = logits.numpy() if isinstance(logits, Tensor) else logits
    warm = temperature > 0
    tempered = values / np.where(warm, temperature, 1.0)[:, None]
    perturbed = tempered.copy()
    rows = np.flatnonzero(warm)
    if len(rows):
        noise = gumbel(
            np.asarray(seeds, np.uint64)[rows], np.asarray(positions)[rows], len(values[0])
        )
        perturbed[rows] += noise
    for row in np.flatnonzero(warm & (top_p < 1.0)):
        perturbed[row, ~nucleus(tempered[row], top_p[row])] = -np.inf
    if count == 1:
        return perturbed.argmax(-1)[:, None]
    found = np.argsort(-perturbed, axis=-1, kind="stable")[:, :count]
    return np.where(np.take_along_axis(perturbed, found, -1) > -np.inf, found, -1)


def _per_draw(name: str, value: ArrayLike, draws: int) -> Floats:
    given = np.asarray(value, dtype=np.float64)
    if given.ndim and given.shape != (draws,):
        raise ValueError(f"{name}: shape {given.shape} for {draws} draws; one value or one a draw")
    return np.broadcast_to(given, (draws,))


def _log_softmax(x: Floats) -> tuple[Floats, Floats]:
    """Log-probabilities (rows, vocab), computed in place of ``x``, and entropies (rows,)."""
    x -= x.max(-1, keepdims=True)
    weight = np.exp(x)
    total = weight.sum(-1)
    weight *= x
    log_total = np.log(total)
    entropies = log_total - weight.sum(-1) / total
    if not np.isfinite(entropies).all():
        row = int(np.flatnonzero(~np.isfinite(entropies))[0])
        raise FloatingPointError(f"logits: row {row} is not finite")
    x -= log_total[:, None]
    return x, entropies


def _perturbed_argmax(
    logprobs: Floats, noise: Floats, heat: Floats, mass: Floats
) -> NDArray[np.int64]:
    """argmax of log-probability / temperature + noise within the nucleus; overwrites ``noise``."""
    with np.errstate(over="ignore"):  # as cold as can be: the likeliest is at 0, others at -inf
        tempered = logprobs if (heat == 1.0).all() else logprobs / heat[:, None]
    noise += tempered
    for row in np.flatnonzero(mass < 1.0):
        noise[row, ~nucleus(tempered[row], mass[row])] = -np.inf
    return noise.argmax(-1)


def nucleus(tempered: Floats, top_p: float) -> NDArray[np.bool_]:
    """The fewest likeliest tokens whose probabilities reach ``top_p``; ties by id. (vocab,)"""
    weight = np.exp(tempered - tempered.max())
    total = weight.sum()
    # all tokens below this weight together hold less than 1 - top_p, so none of them is kept
    likely = np.flatnonzero(weight >= (1.0 - top_p) * total / len(weight))
    order = likely[np.argsort(-weight[likely], kind="stable")]
    before = np.cumsum(weight[order]) - weight[order]
    kept = np.zeros(len(weight), dtype=np.bool_)
    kept[order[before < top_p * total]] = True
    return kept
