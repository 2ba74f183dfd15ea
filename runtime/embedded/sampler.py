"""Draw tokens by coupled noise, with each draw's log-probability and entropy.

Float64 throughout, each draw by itself: its token, log-probability and entropy have the same bits
whatever is drawn beside it. ``shortlist`` names the few tokens of a vocabulary that must be
computed in float64; draws that it cannot decide compute all tokens.
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
"""Most tokens that may be in a nucleus for it to be sorted."""
COLD = 1e-290
"""Temperatures up to this take the likeliest token: dividing by less would give infinite scores."""
SUMMED = 1 << 16
"""Logits that are summed together: with their float64 copies they fit a core's cache."""
NEAR = 1e-9
"""Relative distance of a sum from its target above which rounding cannot matter."""


DrawToken = Callable[[NDArray[np.float32]], int]
"""Draws a token from its row of logits, (vocab,)."""


class Samples(NamedTuple):
    """The results of all draws, arrays (draws,).

    ``tokens``: int64 ids; ``logprobs``: the tokens' natural log-probabilities; ``entropies``:
    Shannon entropies in nats; both of the untempered, untruncated distribution.
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
    one per draw; temperature 0 takes the likeliest token. ``processed``: functions that draw where
    sampling changes logits, by number. Raises FloatingPointError for logits that are not finite.
    """
    values = logits.numpy() if isinstance(logits, Tensor) else logits
    row_ids = np.arange(len(values))
    draw_rows = row_ids if rows is None else np.asarray(rows, dtype=np.int64)
    heat = np.broadcast_to(np.asarray(temperature, np.float64), draw_rows.shape)
    mass = np.broadcast_to(np.asarray(top_p, np.float64), draw_rows.shape)
    likeliest = values.argmax(-1)
    most = values[np.arange(len(values)), likeliest].astype(np.float64)
    log_total, entropies = np.empty((2, len(values)))

    def add_up(block: slice) -> None:
        log_total[block], entropies[block] = _log_total(values[block], most[block], block.start)

    _share(add_up, [*blocks(len(values), values.shape[1], SUMMED)])
    draws = Draws(
        rows=draw_rows,
        likeliest=likeliest[draw_rows],
        most=most[draw_rows],
        log_total=log_total[draw_rows],
        heat=heat,
        mass=mass,
        seeds=np.asarray(seeds, np.uint64),
        positions=np.asarray(positions, np.int64),
    )
    tokens = shortlist_samples(values, draws)
    tokens[heat <= COLD] = draws.likeliest[heat <= COLD]
    for number, draw_token in processed.items():
        tokens[number] = draw_token(values[draw_rows[number]])
    remaining = (tokens < 0).nonzero()[0]

    def draw(block: slice) -> None:
        part = draws.some(remaining[block])
        scores = _scores(values[part.rows], part)
        tokens[remaining[block]] = _ranked(scores, part.seeds, part.positions, part.mass)[:, 0]

    _share(draw, [*blocks(len(remaining), values.shape[1])])
    logprobs = values[draw_rows, tokens] - draws.most
    logprobs -= draws.log_total
    return Samples(tokens, logprobs, entropies[draw_rows])


def top_logprobs(
    logits: NDArray[np.float32], sampled: tuple[int, float, float], most: int
) -> tuple[tuple[int, float], ...]:
    """The ``most`` likeliest tokens of a row (vocab,) with their log-probabilities, the likeliest
    first, ties by id. ``sampled``: a token of the row, its log-probability, and the entropy."""
    token, logprob, _ = sampled
    most = min(most, len(logits))
    if not most:
        return ()
    likely = np.flatnonzero(logits >= np.partition(logits, -most)[-most])
    likely = likely[np.argsort(-logits[likely], kind="stable")[:most]]
    values = logits[likely].astype(np.float64) + (logprob - float(logits[token]))
    return tuple(zip(likely.tolist(), values.tolist(), strict=True))


def _share(work: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Run ``work`` on all parts, on as many threads as torch uses; parts must not share output."""
    threads = min(len(parts), torch.get_num_threads())

    def work_from(first: int) -> None:
        for part in parts[first::threads]:
            work(part)

    futures = [_threads().submit(work_from, first) for first in range(1, threads)]
    if parts:
        work_from(0)
    for future in futures:
        future.result()


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
    """The ``count`` tokens of each row with the highest noisy scores, int64 (rows, count): first
    what ``sample`` would draw. -1 fills up where top-p leaves fewer.

    Arguments as in ``sample``, with one temperature and top-p per row.
    """
    values = logits.numpy() if isinstance(logits, Tensor) else logits
    seeds, positions = np.asarray(seeds, np.uint64), np.asarray(positions)
    ranked = np.empty((len(values), count), dtype=np.int64)
    for block in blocks(*values.shape):
        warm = np.where(temperature[block] > 0, temperature[block], 1.0)[:, None]
        scores = SCRATCH.take("scores", values[block].shape, np.float64)
        np.divide(values[block], warm, out=scores)
        ranked[block] = _ranked(scores, seeds[block], positions[block], top_p[block], count)
    for row in np.flatnonzero(temperature <= 0):
        ranked[row] = -1
        top = min(count, values.shape[1])
        likely = np.flatnonzero(values[row] >= np.partition(values[row], -top)[-top])
        order = np.argsort(-values[row, likely], kind="stable")
        ranked[row, :top] = likely[order[:top]]
    return ranked


def _log_total(logits: NDArray[np.float32], most: Floats, first: int) -> tuple[Floats, Floats]:
    """For each row, the log of the sum of exp(logit - most), and the entropy: (rows,) each.

    ``most`` (rows,): each row's highest logit. ``first``: the first row's number, for errors.
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
    """The scores that noise is added to: (draws, vocab), valid until the next call."""
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
    """The ``count`` tokens of each row (draws, vocab) with the highest noisy scores within its
    nucleus of ``mass``: ids (draws, count), as from ``gumbel_max``."""
    best = np.empty((len(scores), count), dtype=np.int64)
    whole, cut = (mass >= 1.0).nonzero()[0], (mass < 1.0).nonzero()[0]
    if len(whole):
        whole_scores = scores[whole] if len(cut) else scores
        words = SCRATCH.take("hashes", whole_scores.shape, np.uint32)
        spare = SCRATCH.take("shifted", whole_scores.shape, np.uint32)
        hashed = hashes(seeds[whole], positions[whole], scores.shape[1], words, spare)
        best[whole] = gumbel_max(whole_scores, hashed, count)
    nuclei: list[tuple[int, NDArray[np.int64]]] = []
    for row in cut.tolist():
        weight, likely, target = _likely(scores[row], mass[row])
        if count == 1 and len(likely) > MANY:
            hashed = hashes(seeds[[row]], positions[[row]], scores.shape[1])
            token = _first_within(scores[row], hashed, weight, target)
        else:
            token = None
        if token is None:
            nuclei.append((row, _cut(weight, likely, target)))
        else:
            best[row] = token
    if nuclei:
        cut, ids = np.array([row for row, _ in nuclei]), [tokens for _, tokens in nuclei]
        place, token = np.repeat(np.arange(len(cut)), [*map(len, ids)]), np.concatenate(ids)
        row = cut[place]
        values = scores[row, token] + gumbel_of(hashes_of(seeds[row], positions[row], token))
        best[cut] = highest(place, token, values, len(cut), count)
    return best


def _first_within(scores: Floats, hashed: Words, weight: Floats, target: float) -> int | None:
    """The token of a row with the highest noisy score within a wide nucleus, found without sorting
    all tokens: only the few that may win are tested for being within it.

    ``target``: the nucleus's sum of weights. None if a sum is so near to it that rounding decides.
    """
    _, tokens = candidates(scores[None], hashed, 1)
    values = scores[tokens] + gumbel_of(hashed[0, tokens])
    for token in tokens[np.lexsort((tokens, -values))]:
        token_weight = weight[token]
        equal_before = np.count_nonzero(weight[:token] == token_weight)
        before = weight[weight > token_weight].sum() + equal_before * token_weight
        if abs(before - target) <= NEAR * target:
            return None
        if before < target:
            return int(token)
    return None


def nucleus(tempered: Floats, top_p: float) -> NDArray[np.int64]:
    """The fewest likeliest tokens of a row (vocab,) whose probabilities reach ``top_p``, the
    likeliest first, ties by id."""
    return _cut(*_likely(tempered, top_p))


def _likely(tempered: Floats, top_p: float) -> tuple[Floats, NDArray[np.int64], float]:
    """A row's weights (vocab,), valid until the next call; its nucleus's tokens and a few more,
    ascending; and the sum of weights that the nucleus must reach."""
    weight = SCRATCH.take("nucleus", tempered.shape, np.float64)
    np.subtract(tempered, tempered.max(), out=weight)
    np.exp(weight, out=weight)
    target = top_p * (total := weight.sum())
    # all tokens below this weight together hold less than 1 - top_p, so none of them is kept
    floor = (1.0 - top_p) * total / len(weight)
    likely = np.flatnonzero(weight >= max(floor, LIKELY[-1]))
    likely_weights = weight[likely]
    if likely_weights.sum() <= target * (1 + MARGIN):
        return weight, np.flatnonzero(weight >= floor), target
    for bound in LIKELY:
        if likely_weights[likely_weights >= bound].sum() > target * (1 + MARGIN):
            return weight, likely[likely_weights >= bound], target
    return weight, likely, target


def _cut(weight: Floats, likely: NDArray[np.int64], target: float) -> NDArray[np.int64]:
    """Those of the ``likely`` tokens that are in the nucleus, the likeliest first."""
    likely_weights = weight[likely]
    order = np.argsort(-likely_weights, kind="stable")
    before = np.cumsum(likely_weights[order]) - likely_weights[order]
    return likely[order[before < target]]
