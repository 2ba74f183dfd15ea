"""Which tokens win by their noise, without the noise of those that cannot.

Noise is G = -log(-log u), and -log u >= 1 - u. So a token of score s reaches the value t only where
1 - u <= exp(s - t), and 1 - u is a hash, which is cheap; t is what a likely token comes to. Few
tokens are left, and for these everything is computed as if it had been for all: the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hedgerow_sglang.noise import Words, gumbel_of

BLOCK = 1 << 18
"""Scores that are looked at together: what is made of them stays within a core's cache."""
FEW = 1 << 16
"""Scores of which all of the noise costs as little."""
HASHES = 2**32 - 1
SPREAD = 2.0**32 * (1 + 1e-4)
SLACK = 2.0
"""Hashes, and as a factor in ``SPREAD``: more than the bound can be off by in float32."""
LIKELY = (2.0**-6, 2.0**-10, 2.0**-14, 2.0**-16, 2.0**-18)
"""Of the likeliest token's probability: few nuclei hold others, and few tokens are sorted fast."""
MARGIN = 1e-12
"""By which a sum must be above what is wanted of it, to be so whatever its rounding."""


def blocks(rows: int, vocab: int, size: int = BLOCK) -> Iterator[slice]:
    """Rows of at most ``size`` scores together, one row at least."""
    step = max(1, size // max(1, vocab))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def gumbel_max(scores: NDArray[np.float64], hashed: Words, count: int = 1) -> NDArray[np.int64]:
    """The ``count`` tokens of the highest ``scores + gumbel_of(hashed)``, both (rows, vocab).

    Returns ids (rows, count), the highest first, equals by id. A score of -inf is no token's; -1
    fills up where fewer are left.
    """
    if count == 1 and scores.size <= FEW:
        return (scores + gumbel_of(hashed)).argmax(-1)[:, None]
    row, token = _candidates(scores, hashed, min(count, scores.shape[1]))
    values = scores[row, token] + gumbel_of(hashed[row, token])
    order = np.lexsort((token, -values, row))
    row, token = row[order], token[order]
    each = np.bincount(row, minlength=len(scores))
    rank = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
    best = np.full((len(scores), count), -1, dtype=np.int64)
    best[row[rank < count], rank[rank < count]] = token[rank < count]
    return best


def _candidates(
    scores: NDArray[np.float64], hashed: Words, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and ids of all tokens that may be among the ``count`` highest, and of few others."""
    if count == 1:
        likely = scores.argmax(-1)[:, None]
    else:
        likely = np.argpartition(-scores, count - 1)[:, :count]
    taken = np.take_along_axis(hashed, likely, -1)
    reached = np.take_along_axis(scores, likely, -1) + gumbel_of(taken)
    with np.errstate(over="ignore", invalid="ignore"):  # where too few are left: all of those
        room = np.exp((scores - reached.min(-1, keepdims=True)).astype(np.float32))
        room *= SPREAD
    room += SLACK
    near = (HASHES - hashed).astype(np.float32) <= room
    near &= scores > -np.inf
    row, token = np.nonzero(near)
    return row, token
