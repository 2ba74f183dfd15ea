"""Draw tokens from the short lists of candidates that ``shortlist.c`` makes of a vocabulary.

Compiled code tests every token in float32, whose errors are bounded; the tokens that it lists are
computed in float64, with the bits that they would have if all were computed. Draws that the list
does not decide are left to the caller.
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
"""Most tokens that are listed for a draw."""
MILD = 1e-3, 1e3
"""The lowest and the highest temperature for which the float32 bounds hold."""
CLOSE = 4e-5
"""Relative error that a sum of float32 weights stays below."""
APART = 1e-11, 1e-13
"""Logits farther apart than the first number plus the second times the highest logit have different
weights in float64, too."""


class Draws(NamedTuple):
    """The draws' inputs, arrays (draws,): the number of the row of logits in ``rows``; the row's
    highest logit ``most``, its token ``likeliest``, and ``log_total``, the log of its sum of
    exp(logit - most); the temperature ``heat``, top-p ``mass``, ``seeds`` and ``positions``."""

    rows: Ids
    likeliest: Ids
    most: Floats
    log_total: Floats
    heat: Floats
    mass: Floats
    seeds: NDArray[np.uint64]
    positions: Ids

    def some(self, numbers: Ids) -> Draws:
        """The draws with these numbers."""
        fields: Any = self
        return Draws(*(field[numbers] for field in fields))


class _Draws(ctypes.Structure):
    """``Draws`` of ``shortlist.c``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "tokens", "most", "per_heat")),
        *((name, ctypes.c_void_p) for name in ("seeds", "positions")),
        *((name, ctypes.c_int64) for name in ("draws", "vocab")),
    ]


class Shortlist:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises NotBuilt if it cannot be loaded."""
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
        """The tokens that may have the highest noisy score within the nucleus, and few others: how
        many each draw has, their ids draw by draw, and their noise's hashes. A draw with more than
        ROOM such tokens gets none."""
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
        """Whether each draw's token is surely within its nucleus, and whether it is surely not."""
        near = (APART[0] + APART[1] * np.abs(draws.most)).astype(np.float32)
        total, before = np.empty((2, len(tokens)))
        unsure = np.empty(len(tokens), dtype=np.bool_)
        _call(self._before, logits, draws, tokens, near, total, before, unsure)
        target = draws.mass * total
        inside = before < target * (1 - CLOSE)
        outside = before > target * (1 + CLOSE)
        return inside & ~unsure, outside & ~unsure


def _call(
    function: Callable[..., None],
    logits: NDArray[np.float32],
    draws: Draws,
    tokens: Ids,
    *arrays: NDArray[Any],
) -> None:
    columns = (
        np.ascontiguousarray(logits, np.float32),
        np.ascontiguousarray(draws.rows, np.int64),
        tokens.astype(np.int32),
        draws.most.astype(np.float32),
        (1 / draws.heat).astype(np.float32),
        np.ascontiguousarray(draws.seeds, np.uint64),
        np.ascontiguousarray(draws.positions, np.int64),
    )
    call = _Draws(*(array.ctypes.data for array in columns), len(tokens), logits.shape[1])
    function(call, *(array.ctypes.data for array in arrays))


@cache
def shortlist() -> Shortlist | None:
    """The library, built if necessary; None if it cannot be, which is logged once."""
    try:
        library = load(SOURCE, "draws", Shortlist)
        _check(library)
    except NotBuilt as error:
        _LOG.warning("draws compute every token's noise, which takes longer: %s", error)
        return None
    return library


def _check(library: Shortlist) -> None:
    """Raise NotBuilt if the library draws other tokens than the definition gives."""
    dice, vocab = np.random.default_rng(0), 300
    numbers = np.arange(32)
    logits = dice.normal(0, 1 + numbers[:, None] % 5, (len(numbers), vocab)).astype(np.float32)
    x = logits.astype(np.float64)
    most = x.max(-1)
    log_total = np.log(np.exp(x - most[:, None]).sum(-1))
    heat, mass = np.where(numbers % 2, 1.0, 0.7), np.where(numbers % 3, 0.9, 1.0)
    scores = (x - (most + log_total)[:, None]) / heat[:, None]
    falling = np.argsort(-scores, kind="stable")
    weight = np.take_along_axis(np.exp(scores), falling, -1)
    before = weight.cumsum(-1) - weight
    in_nucleus = (before < mass[:, None] * weight.sum(-1, keepdims=True)) | (mass == 1)[:, None]
    seeds = numbers.astype(np.uint64)
    values = np.take_along_axis(scores + gumbel(seeds, numbers, vocab), falling, -1)
    expected = falling[numbers, np.where(in_nucleus, values, -np.inf).argmax(-1)]
    draws = Draws(numbers, logits.argmax(-1), most, log_total, heat, mass, seeds, numbers)
    sampled = _first_within(library, logits, draws)
    if (sampled != expected).any():
        raise NotBuilt(f"{(sampled != expected).sum()} of {len(numbers)} draws are wrong")


def shortlist_samples(logits: NDArray[np.float32], draws: Draws) -> Ids:
    """The token of each draw as ``sample`` defines it, (draws,); -1 where it is not decided.

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
    """``shortlist_samples`` for MILD temperatures. A nucleus and its draw's list both contain the
    likeliest token, so the listed token with the highest score that is within the nucleus wins."""
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
    undecided = listed[draws.mass[listed] < 1]
    while len(undecided):
        inside, outside = library.within(logits, draws.some(undecided), best[undecided])
        best[undecided[~inside]] = -1
        undecided = undecided[outside & (place[undecided] + 1 < ends[undecided])]
        place[undecided] += 1
        best[undecided] = token[place[undecided]]
    return best
