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

from hedgerow_sglang.gumbel_max import LIKELY, MARGIN, blocks, gumbel_max
from hedgerow_sglang.noise import hashes

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
    noise = np.asarray(seeds, np.uint64), np.asarray(positions)
    tokens = values.argmax(-1)[of]
    drawn, entropies = np.empty(len(of)), np.empty(len(values))
    for block in blocks(*values.shape):
        logprobs, entropies[block] = _log_softmax(values[block].astype(np.float64), block.start)
        draws = np.flatnonzero((of >= block.start) & (of < block.stop))
        warm = draws[heat[draws] > 0]
        for part in blocks(len(warm), values.shape[1]):
            some = warm[part]
            scores = _scores(logprobs, of[some] - block.start, heat[some], mass[some])
            hashed = hashes(noise[0][some], noise[1][some], values.shape[1])
            tokens[some] = gumbel_max(scores, hashed)[:, 0]
        drawn[draws] = logprobs[of[draws] - block.start, tokens[draws]]
    return Samples(tokens, drawn, entropies[of])


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
    vocab = values.shape[1]
    seeded, at = np.asarray(seeds, np.uint64), np.asarray(positions)
    found = np.empty((len(values), count), dtype=np.int64)
    for block in blocks(*values.shape):
        warm = temperature[block] > 0
        scores = values[block] / np.where(warm, temperature[block], 1.0)[:, None]
        for row in np.flatnonzero(warm & (top_p[block] < 1.0)):
            scores[row, ~nucleus(scores[row], top_p[block][row])] = -np.inf
        hashed = hashes(seeded[block], at[block], vocab)
        found[block] = gumbel_max(scores, hashed, count)
    for row in np.flatnonzero(temperature <= 0):
        found[row] = -1
        found[row, :vocab] = np.argsort(-values[row], kind="stable")[:count]
    return found


def _per_draw(name: str, value: ArrayLike, draws: int) -> Floats:
    given = np.asarray(value, dtype=np.float64)
    if given.ndim and given.shape != (draws,):
        raise ValueError(f"{name}: shape {given.shape} for {draws} draws; one value or one a draw")
    return np.broadcast_to(given, (draws,))


def _log_softmax(x: Floats, first: int) -> tuple[Floats, Floats]:
    """Log-probabilities (rows, vocab), computed in place of ``x``, and entropies (rows,).

    ``first``: the number of its first row among all.
    """
    x -= x.max(-1, keepdims=True)
    weight = np.exp(x)
    total = weight.sum(-1)
    weight *= x
    log_total = np.log(total)
    entropies = log_total - weight.sum(-1) / total
    if not np.isfinite(entropies).all():
        row = first + int(np.flatnonzero(~np.isfinite(entropies))[0])
        raise FloatingPointError(f"logits: row {row} is not finite")
    x -= log_total[:, None]
    return x, entropies


def _scores(logprobs: Floats, rows: NDArray[np.int64], heat: Floats, mass: Floats) -> Floats:
    """What noise is added to: tempered log-probabilities of ``rows``, -inf outside the nucleus."""
    scores = logprobs if np.array_equal(rows, np.arange(len(logprobs))) else logprobs[rows]
    if (heat != 1.0).any():
        with np.errstate(over="ignore"):  # as cold as can be: the likeliest at 0, others at -inf
            scores = scores / heat[:, None]
    cut = np.flatnonzero(mass < 1.0)
    if len(cut):
        scores = scores.copy()
    for row in cut:
        scores[row, ~nucleus(scores[row], mass[row])] = -np.inf
    return scores


def nucleus(tempered: Floats, top_p: float) -> NDArray[np.bool_]:
    """The fewest likeliest tokens whose probabilities reach ``top_p``; ties by id. (vocab,)"""
    weight = np.exp(tempered - tempered.max())
    wanted = top_p * (total := weight.sum())
    # all tokens below this weight together hold less than 1 - top_p, so none of them is kept
    floor = (1.0 - top_p) * total / len(weight)
    enough = (b for b in LIKELY if b > floor and weight[weight >= b].sum() > wanted * (1 + MARGIN))
    likely = np.flatnonzero(weight >= next(enough, floor))
    order = likely[np.argsort(-weight[likely], kind="stable")]
    before = np.cumsum(weight[order]) - weight[order]
    kept = np.zeros(len(weight), dtype=np.bool_)
    kept[order[before < wanted]] = True
    return kept
