"""The tokens with the highest score plus Gumbel noise, without computing the noise of all tokens.

Noise is G = -log(-log u), and -log u >= 1 - u. So a token of score s reaches the value t only where
1 - u <= exp(s - t), and 1 - u is a cheap hash; t is the value of a likely token. The few tokens
that pass are computed exactly as they would be among all tokens: the result has the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hedgerow_sglang.noise import SCRATCH, Words, gumbel_of

FEW = 1 << 16
"""Up to so many scores the noise of all is computed: selecting tokens first saves nothing."""
HASHES = 2**32 - 1
SPREAD = 2.0**32 * (1 + 1e-4)
SLACK = 2.0
"""Added to the bound, in hashes; it and ``SPREAD``'s factor exceed what float32 is off by."""
ROUNDING = 1e-15
"""Share of a score that adding its noise may round off: all noise, at very low temperatures."""
WORD = 8
"""Booleans that are tested at once, as one 64-bit word."""
LIKELY = (2.0**-6, 2.0**-10, 2.0**-14, 2.0**-16, 2.0**-18)
"""Floors to try for a nucleus, as shares of the top probability: few tokens are sorted fast."""
MARGIN = 1e-12
"""Relative excess over its target that a sum needs, so that rounding cannot matter."""


def gumbel_max(scores: NDArray[np.float64], hashed: Words, count: int = 1) -> NDArray[np.int64]:
    """The ``count`` tokens of the highest ``scores + gumbel_of(hashed)``, both (rows, vocab).

    Returns ids (rows, count), the highest first, ties by lower id. Tokens with score -inf are left
    out, and -1 fills the places that remain (but for one draw of few scores: see ``FEW``).
    """
    if count == 1 and scores.size <= FEW:
        return (scores + gumbel_of(hashed)).argmax(-1)[:, None]
    row, token = candidates(scores, hashed, min(count, scores.shape[1]))
    values = scores[row, token] + gumbel_of(hashed[row, token])
    return highest(row, token, values, len(scores), count)


def highest(
    row: NDArray[np.int64],
    token: NDArray[np.int64],
    values: NDArray[np.float64],
    rows: int,
    count: int,
) -> NDArray[np.int64]:
    """The ``count`` tokens with the highest values of each row, as ``gumbel_max`` returns them;
    ``row``, ``token`` and ``values``: of every candidate."""
    if count == 1:  # dropping all but each row's highest first is cheaper than sorting
        most = np.full(rows, -np.inf)
        np.maximum.at(most, row, values)
        top = values == most[row]
        row, token, values = row[top], token[top], values[top]
    order = np.lexsort((token, -values, row))
    row, token = row[order], token[order]
    each = np.bincount(row, minlength=rows)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
    best = np.full((rows, count), -1, dtype=np.int64)
    best[row[rank < count], rank[rank < count]] = token[rank < count]
    return best


def candidates(
    scores: NDArray[np.float64], hashed: Words, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and ids of all tokens that may be among a row's ``count`` highest, and of few others."""
    likely = _likely(scores, count)
    rows = np.arange(len(scores))[:, None]
    values = scores[rows, likely] + gumbel_of(hashed[rows, likely])
    least = np.partition(values, -count)[:, -count, None]
    least -= ROUNDING * abs(least)
    room = SCRATCH.take("room", scores.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # rows with fewer tokens keep all
        np.subtract(scores, least - math.log(SPREAD), out=room, casting="same_kind")
        np.exp(room, out=room)
    room += SLACK
    above = SCRATCH.take("above", scores.shape, np.float32)
    np.subtract(HASHES, hashed, out=above, dtype=np.uint32, casting="unsafe")
    row, token = np.divmod(_places(above, room), scores.shape[1])
    allowed = scores[row, token] > -np.inf
    return row[allowed], token[allowed]


def _places(above: NDArray[np.float32], room: NDArray[np.float32]) -> NDArray[np.int64]:
    """Flat indices where ``above`` <= ``room``: they are few, so tests go word by word."""
    size = -(-above.size // WORD) * WORD
    near = SCRATCH.take("near", (size,), np.bool_)
    near[above.size :] = False
    np.less_equal(above, room, out=near[: above.size].reshape(above.shape))
    words = np.flatnonzero(near.view(np.uint64))
    word, byte = np.nonzero(near.reshape(-1, WORD)[words])
    return words[word] * WORD + byte


def _likely(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """At least ``count`` tokens of each row: the likeliest one of each of its stretches."""
    vocab = scores.shape[1]
    parts = 1 if count == 1 else min(vocab, 4 * count)
    width = vocab // parts
    stretches = scores[:, : parts * width].reshape(len(scores), parts, width)
    return stretches.argmax(-1) + width * np.arange(parts)
