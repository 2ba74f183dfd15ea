"""The tokens of draws, told from the few that ``shortlist.c`` leaves of a vocabulary.

Compiled code looks at every token in float32, whose errors are bounded; what it lists is looked at
in float64, and has there the bits that it would have with everything computed. What so few do not
tell is left to who asks.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hedgerow_sglang.noise import gumbel, gumbel_of
from runtime.embedded.model.native import NotBuilt, load

_LOG = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

SOURCE = Path(__file__).with_suffix(".c")
ROOM = 1024
"""Tokens that are listed for a draw, at most."""
MILD = 1e-3, 1e3
"""Temperatures by which float32 can divide without harm to the bounds."""
CLOSE = 4e-5
"""Of what is wanted of a sum: float32 weights are not off by so much."""
APART = 1e-11, 1e-13
"""Logits that are farther apart have other weights in float64 too: so much, and this times the
highest one."""


class Draws(NamedTuple):
    """What tokens are drawn from, each array (draws,): a row's highest logit ``most``, at its token
    ``likeliest``, the logarithm ``log_total`` of what exp(logit - most) add up to there, and by
    ``heat``, the temperature, within the nucleus of ``mass``, under ``seeds`` and ``positions``."""

    rows: Ids
    likeliest: Ids
    most: Floats
    log_total: Floats
    heat: Floats
    mass: Floats
    seeds: NDArray[np.uint64]
    positions: Ids

    def some(self, which: Ids) -> Draws:
        """Those of these numbers."""
        fields: Any = self
        return Draws(*(field[which] for field in fields))


class _Draws(ctypes.Structure):
    """``Draws`` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "tokens", "most", "per_heat")),
        *((name, ctypes.c_void_p) for name in ("seeds", "positions")),
        *((name, ctypes.c_int64) for name in ("draws", "vocab")),
    ]


class Shortlist:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises NotBuilt where the machine's loader does not take it."""
        try:
            library = ctypes.CDLL(str(path))
            functions = self._may_win, self._before = library.may_win, library.weights_before
        except (OSError, AttributeError) as error:
            raise NotBuilt(f"{path}: {error}") from error
        for function in functions:
            function.restype = None
            function.argtypes = [ctypes.POINTER(_Draws), *4 * [ctypes.c_void_p]]

    def may_win(
        self, logits: NDArray[np.float32], draws: Draws
    ) -> tuple[Ids, Ids, NDArray[np.uint32]]:
        """All tokens that may have the highest score with their noise within the nucleus, and few
        others: how many each draw has, their ids draw by draw, and the hashes of their noise. None
        of a draw that has more than ROOM."""
        cut = (draws.mass < 1).view(np.uint8)
        tokens = np.empty((len(cut), ROOM), dtype=np.int32)
        hashed = np.empty((len(cut), ROOM), dtype=np.uint32)
        counts = np.empty(len(cut), dtype=np.int64)
        _call(self._may_win, logits, draws, draws.likeliest, cut, tokens, hashed, counts)
        counts[counts > ROOM] = 0
        listed = np.arange(counts.max()) < counts[:, None]
        most = listed.shape[1]
        return counts, tokens[:, :most][listed].astype(np.int64), hashed[:, :most][listed]

    def within(
        self, logits: NDArray[np.float32], draws: Draws, tokens: Ids
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether each draw's token is within its nucleus; and whether it is not."""
        near = (APART[0] + APART[1] * np.abs(draws.most)).astype(np.float32)
        total, before = np.empty((2, len(tokens)))
        unsure = np.empty(len(tokens), dtype=np.bool_)
        _call(self._before, logits, draws, tokens, near, total, before, unsure)
        wanted = draws.mass * total
        inside = before < wanted * (1 - CLOSE)
        outside = before > wanted * (1 + CLOSE)
        return inside & ~unsure, outside & ~unsure


def _call(
    function: Callable[..., None],
    logits: NDArray[np.float32],
    draws: Draws,
    tokens: Ids,
    *arrays: NDArray[Any],
) -> None:
    own = (
        np.ascontiguousarray(logits, np.float32),
        np.ascontiguousarray(draws.rows, np.int64),
        tokens.astype(np.int32),
        draws.most.astype(np.float32),
        (1 / draws.heat).astype(np.float32),
        np.ascontiguousarray(draws.seeds, np.uint64),
        np.ascontiguousarray(draws.positions, np.int64),
    )
    call = _Draws(*(array.ctypes.data for array in own), len(tokens), logits.shape[1])
    function(call, *(array.ctypes.data for array in arrays))


@cache
def shortlist() -> Shortlist | None:
    """The library, built if need be; None where it cannot be, which is said once."""
    try:
        library = load(SOURCE, "draws", Shortlist)
        _check(library)
    except NotBuilt as error:
        _LOG.warning("draws compute every token's noise, which takes longer: %s", error)
        return None
    return library


def _check(library: Shortlist) -> None:
    """Raise NotBuilt if it draws otherwise than by the definition."""
    dice, vocab = np.random.default_rng(0), 300
    each = np.arange(32)
    logits = dice.normal(0, 1 + each[:, None] % 5, (len(each), vocab)).astype(np.float32)
    x = logits.astype(np.float64)
    most = x.max(-1)
    log_total = np.log(np.exp(x - most[:, None]).sum(-1))
    heat, mass = np.where(each % 2, 1.0, 0.7), np.where(each % 3, 0.9, 1.0)
    scores = (x - (most + log_total)[:, None]) / heat[:, None]
    falling = np.argsort(-scores, kind="stable")
    weight = np.take_along_axis(np.exp(scores), falling, -1)
    before = weight.cumsum(-1) - weight
    kept = (before < mass[:, None] * weight.sum(-1, keepdims=True)) | (mass == 1)[:, None]
    seeds = each.astype(np.uint64)
    values = np.take_along_axis(scores + gumbel(seeds, each, vocab), falling, -1)
    expected = falling[each, np.where(kept, values, -np.inf).argmax(-1)]
    draws = Draws(each, logits.argmax(-1), most, log_total, heat, mass, seeds, each)
    sampled = _first_within(library, logits, draws)
    if (sampled != expected).any():
        raise NotBuilt(f"{(sampled != expected).sum()} of {len(each)} draws are wrong")


def shortlist_samples(logits: NDArray[np.float32], draws: Draws) -> Ids:
    """The token of every draw as ``sample`` describes it, (draws,); -1 where it is not told.

    ``logits`` (rows, vocab): finite.
    """
    library = shortlist()
    mild = (draws.heat >= MILD[0]) & (draws.heat <= MILD[1])
    if library is None or not mild.any():
        return np.full(len(mild), -1)
    if mild.all():
        return _first_within(library, logits, draws)
    best = np.full(len(mild), -1)
    best[mild] = _first_within(library, logits, draws.some(mild.nonzero()[0]))
    return best


def _first_within(library: Shortlist, logits: NDArray[np.float32], draws: Draws) -> Ids:
    """That of mild draws. A nucleus holds the likeliest token, and so does its draw's list: what
    wins is the first of the list that is within."""
    counts, token, hashed = library.may_win(logits, draws)
    draw = np.repeat(np.arange(len(counts)), counts)
    values = logits[draws.rows[draw], token] - draws.most[draw]
    values -= draws.log_total[draw]
    values /= draws.heat[draw]
    values += gumbel_of(hashed)
    token = token[np.lexsort((token, -values, draw))]
    ends = np.cumsum(counts)
    place, listed = ends - counts, counts.nonzero()[0]
    best = np.full(len(counts), -1)
    best[listed] = token[place[listed]]
    left = listed[draws.mass[listed] < 1]
    while len(left):
        inside, outside = library.within(logits, draws.some(left), best[left])
        best[left[~inside]] = -1
        left = left[outside & (place[left] + 1 < ends[left])]
        place[left] += 1
        best[left] = token[place[left]]
    return best
