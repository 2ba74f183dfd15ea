"""Drawing tokens by coupled noise, and what is known of each draw.

Float64 throughout, every draw by itself: its token, log-probability and entropy are the same bits
whatever is drawn beside it. Which tokens of a vocabulary float64 need look at, ``shortlist`` knows;
what is left over looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hedgerow_sglang.gumbel_max import LIKELY, MARGIN, candidates, gumbel_max, highest
from hedgerow_sglang.noise import SCRATCH, Words, blocks, gumbel_of, hashes, hashes_of
from runtime.embedded.shortlist import Draws, Floats, shortlist_samples

MANY = 2048
"""Tokens that may be in a nucleus, above which they are not put in order."""
COLD = 1e-290
"""Temperatures up to which the likeliest token is taken: scores by less would be infinite."""
SUMMED = 1 << 16
"""Logits that are added up together: with float64 of them they stay within a core's cache."""
NEAR = 1e-9
"""Of what is wanted of a sum: however it is rounded, it is not off by so much."""


DrawToken = Callable[[NDArray[np.float32]], int]
"""Draws a token from its row of logits, (vocab,)."""


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
    processed: Mapping[int, DrawToken] = MappingProxyType({}),
) -> Samples:
    """Draw tokens from ``logits`` (rows, vocab): one from each row, or one from each of ``rows``,
    which may name a row for several draws.

    token = argmax over v of log p(v) / temperature + Gumbel(seed, position, v), over the tokens
    that top-p keeps; ties go to the lower id. ``seeds`` in [0, 2^64); ``positions``: the absolute
    position of the token drawn. ``temperature``, 0 or more, and ``top_p`` in (0, 1]: one for all or
    one a draw; temperature 0 takes the likeliest token. ``processed``: what draws those whose
    sampling changes logits, by number. Raises FloatingPointError for logits that are not finite.
    """
    values = logits.numpy() if isinstance(logits, Tensor) else logits
    each = np.arange(len(values))
    of = each if rows is None else np.asarray(rows, dtype=np.int64)
    heat = np.broadcast_to(np.asarray(temperature, np.float64), of.shape)
    mass = np.broadcast_to(np.asarray(top_p, np.float64), of.shape)
    likeliest = values.argmax(-1)
    most = values[np.arange(len(values)), likeliest].astype(np.float64)
    log_total, entropies = np.empty((2, len(values)))

    def add_up(block: slice) -> None:
        log_total[block], entropies[block] = _log_total(values[block], most[block], block.start)

    _share(add_up, [*blocks(len(values), values.shape[1], SUMMED)])
    draws = Draws(
        rows=of,
        likeliest=likeliest[of],
        most=most[of],
        log_total=log_total[of],
        heat=heat,
        mass=mass,
        seeds=np.asarray(seeds, np.uint64),
        positions=np.asarray(positions, np.int64),
    )
    tokens = shortlist_samples(values, draws)
    tokens[heat <= COLD] = draws.likeliest[heat <= COLD]
    for number, draw_token in processed.items():
        tokens[number] = draw_token(values[of[number]])
    left = (tokens < 0).nonzero()[0]

    def draw(block: slice) -> None:
        own = draws.some(left[block])
        best = _ranked(_scores(values[own.rows], own), own.seeds, own.positions, own.mass)
        tokens[left[block]] = best[:, 0]

    _share(draw, [*blocks(len(left), values.shape[1])])
    logprobs = values[of, tokens] - draws.most
    logprobs -= draws.log_total
    return Samples(tokens, logprobs, entropies[of])


def top_logprobs(
    logits: NDArray[np.float32], sampled: tuple[int, float, float], most: int
) -> tuple[tuple[int, float], ...]:
    """The ``most`` likeliest tokens of a row (vocab,) with their log-probabilities, the likeliest
    first, equals by id. ``sampled``: a token of it with its own, and the entropy."""
    token, logprob, _ = sampled
    most = min(most, len(logits))
    if not most:
        return ()
    likely = np.flatnonzero(logits >= np.partition(logits, -most)[-most])
    likely = likely[np.argsort(-logits[likely], kind="stable")[:most]]
    values = logits[likely].astype(np.float64) + (logprob - float(logits[token]))
    return tuple(zip(likely.tolist(), values.tolist(), strict=True))


def _share(work: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Do the parts, on as many threads as torch computes with; what each writes is its own."""
    threads = min(len(parts), torch.get_num_threads())

    def some(first: int) -> None:
        for part in parts[first::threads]:
            work(part)

    others = [_threads().submit(some, first) for first in range(1, threads)]
    if parts:
        some(0)
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="draw")


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
    seeded, at = np.asarray(seeds, np.uint64), np.asarray(positions)
    ranked = np.empty((len(values), count), dtype=np.int64)
    for block in blocks(*values.shape):
        warm = np.where(temperature[block] > 0, temperature[block], 1.0)[:, None]
        scores = SCRATCH.take("scores", values[block].shape, np.float64)
        np.divide(values[block], warm, out=scores)
        ranked[block] = _ranked(scores, seeded[block], at[block], top_p[block], count)
    for row in np.flatnonzero(temperature <= 0):
        ranked[row] = -1
        most = min(count, values.shape[1])
        likely = np.flatnonzero(values[row] >= np.partition(values[row], -most)[-most])
        order = np.argsort(-values[row, likely], kind="stable")
        ranked[row, :most] = likely[order[:most]]
    return ranked


def _log_total(logits: NDArray[np.float32], most: Floats, first: int) -> tuple[Floats, Floats]:
    """The logarithm of what exp(logit - most) add up to, and the entropy, of every row: (rows,).

    ``most``: each row's highest, (rows,). ``first``: the number of its first row among all.
    """
    x = SCRATCH.take("logits", logits.shape, np.float64)
    weight = SCRATCH.take("weights", logits.shape, np.float64)
    np.subtract(logits, most[:, None], out=x)
    np.exp(x, out=weight)
    total = weight.sum(-1)
    log_total = np.log(total)
    x *= weight
    entropies = log_total - x.sum(-1) / total
    if not np.isfinite(entropies).all():
        row = first + int(np.flatnonzero(~np.isfinite(entropies))[0])
        raise FloatingPointError(f"logits: row {row} is not finite")
    return log_total, entropies


def _scores(logits: NDArray[np.float32], draws: Draws) -> Floats:
    """What noise is added to, of every token: (draws, vocab), good until the next call."""
    x = SCRATCH.take("scores", logits.shape, np.float64)
    np.subtract(logits, draws.most[:, None], out=x)
    x -= draws.log_total[:, None]
    if (draws.heat != 1.0).any():
        with np.errstate(over="ignore"):
            x /= draws.heat[:, None]
    return x


def _ranked(
    scores: Floats,
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    mass: Floats,
    count: int = 1,
) -> NDArray[np.int64]:
    """The ``count`` tokens of every row (draws, vocab) that come highest with their noise, within
    its nucleus of ``mass``: ids (draws, count), as of ``gumbel_max``."""
    best = np.empty((len(scores), count), dtype=np.int64)
    whole, cut = (mass >= 1.0).nonzero()[0], (mass < 1.0).nonzero()[0]
    if len(whole):
        some = scores[whole] if len(cut) else scores
        words = SCRATCH.take("hashes", some.shape, np.uint32)
        spare = SCRATCH.take("shifted", some.shape, np.uint32)
        hashed = hashes(seeds[whole], positions[whole], scores.shape[1], words, spare)
        best[whole] = gumbel_max(some, hashed, count)
    few: list[tuple[int, NDArray[np.int64]]] = []
    for row in cut.tolist():
        weight, likely, wanted = _likely(scores[row], mass[row])
        if count == 1 and len(likely) > MANY:
            hashed = hashes(seeds[[row]], positions[[row]], scores.shape[1])
            token = _first_within(scores[row], hashed, weight, wanted)
        else:
            token = None
        if token is None:
            few.append((row, _cut(weight, likely, wanted)))
        else:
            best[row] = token
    if few:
        cut, kept = np.array([row for row, _ in few]), [tokens for _, tokens in few]
        place, token = np.repeat(np.arange(len(cut)), [*map(len, kept)]), np.concatenate(kept)
        row = cut[place]
        values = scores[row, token] + gumbel_of(hashes_of(seeds[row], positions[row], token))
        best[cut] = highest(place, token, values, len(cut), count)
    return best


def _first_within(scores: Floats, hashed: Words, weight: Floats, wanted: float) -> int | None:
    """The token of a row that comes highest with its noise within the nucleus, where that is wide:
    whether it holds the few that may win is told without an order of all.

    None where a sum is so near to ``wanted`` that its rounding decides.
    """
    _, tokens = candidates(scores[None], hashed, 1)
    values = scores[tokens] + gumbel_of(hashed[0, tokens])
    for token in tokens[np.lexsort((tokens, -values))]:
        own = weight[token]
        equals = np.count_nonzero(weight[:token] == own)
        before = weight[weight > own].sum() + equals * own
        if abs(before - wanted) <= NEAR * wanted:
            return None
        if before < wanted:
            return int(token)
    return None


def nucleus(tempered: Floats, top_p: float) -> NDArray[np.int64]:
    """The fewest likeliest tokens of a row (vocab,) whose probabilities reach ``top_p``, the
    likeliest first, equals by id."""
    return _cut(*_likely(tempered, top_p))


def _likely(tempered: Floats, top_p: float) -> tuple[Floats, NDArray[np.int64], float]:
    """Weights of a row (vocab,), good until the next call; the tokens of its nucleus and not many
    more, ascending; and what sum of weights is wanted."""
    weight = SCRATCH.take("nucleus", tempered.shape, np.float64)
    np.subtract(tempered, tempered.max(), out=weight)
    np.exp(weight, out=weight)
    wanted = top_p * (total := weight.sum())
    # all tokens below this weight together hold less than 1 - top_p, so none of them is kept
    floor = (1.0 - top_p) * total / len(weight)
    likely = np.flatnonzero(weight >= max(floor, LIKELY[-1]))
    own = weight[likely]
    if own.sum() <= wanted * (1 + MARGIN):
        return weight, np.flatnonzero(weight >= floor), wanted
    for bound in LIKELY:
        if own[own >= bound].sum() > wanted * (1 + MARGIN):
            return weight, likely[own >= bound], wanted
    return weight, likely, wanted


def _cut(weight: Floats, likely: NDArray[np.int64], wanted: float) -> NDArray[np.int64]:
    """Of the tokens that may be in a nucleus those that are, the likeliest first."""
    own = weight[likely]
    order = np.argsort(-own, kind="stable")
    before = np.cumsum(own[order]) - own[order]
    return likely[order[before < wanted]]
