"""Coupled noise: Gumbel variates that follow from (seed, position, token id) and nothing else.

MurmurHash3 (x86, 32 bits, initial state 0) over four words: the seed's low and high half, the
position, the column. Then u = hash / (2^32 - 1) and Gumbel = -log(-log u) in float64, log u clamped
to [float64's least, -2^-32]. This is SGLang's seeded sampling, except that the column is always the
token id; under top-p SGLang's PyTorch backend takes the rank in the sorted distribution.

Noise for a whole vocabulary takes much memory: it is made for blocks of rows, in reused arrays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_ADD = np.uint32(0xE6546B64)
_FIVE = np.uint32(5)
_LENGTH = np.uint32(16)
_LOW = np.finfo(np.float64).min
_HIGH = -(2.0**-32)

BLOCK = 1 << 18
"""Scores that are processed together, so that temporary arrays fit into a core's cache."""

Words = NDArray[np.uint32]


def gumbel(
    seeds: Sequence[int] | NDArray[np.uint64],
    positions: Sequence[int] | NDArray[np.int64],
    vocab: int,
) -> NDArray[np.float64]:
    """Gumbel noise (rows, vocab) for a draw at each row's absolute position.

    ``seeds`` (rows,) in [0, 2^64), ``positions`` (rows,) in [0, 2^32): the position of the token
    drawn, that is the length of its prefix.
    """
    return gumbel_of(hashes(seeds, positions, vocab))


def gumbel_of(hashed: Words) -> NDArray[np.float64]:
    """The Gumbel noise of ``hashes``, float64 of the same shape."""
    noise = hashed.astype(np.float64)
    noise /= 2.0**32 - 1
    with np.errstate(divide="ignore"):
        np.log(noise, out=noise)
    np.clip(noise, _LOW, _HIGH, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def hashes(
    seeds: Sequence[int] | NDArray[np.uint64],
    positions: Sequence[int] | NDArray[np.int64],
    vocab: int,
    out: Words | None = None,
    scratch: Words | None = None,
) -> Words:
    """The 32-bit hashes under ``gumbel``: uint32 (rows, vocab), in ``out`` if that is given.

    ``scratch``: an array of that shape that may be written to.
    """
    state = _state(seeds, positions)
    return _last(np.bitwise_xor(state[:, None], _columns(vocab), out=out), scratch)


def hashes_of(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
) -> Words:
    """The hash of one token for each seed and position; all three arrays have one length."""
    return _last(_state(seeds, positions) ^ _scramble(tokens.astype(np.uint32)))


def _state(
    seeds: Sequence[int] | NDArray[np.uint64], positions: Sequence[int] | NDArray[np.int64]
) -> Words:
    """The hash state after the seed's two words and the position, (rows,)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    low = (seed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (seed >> np.uint64(32)).astype(np.uint32)
    position = np.asarray(positions).astype(np.uint32)
    state = np.zeros_like(low)
    for word in (low, high, position):
        state ^= _scramble(word)
        _turn(state)
    return state


@lru_cache(maxsize=8)
def _columns(vocab: int) -> Words:
    """The scrambled fourth word of every column, (vocab,)."""
    columns = _scramble(np.arange(vocab, dtype=np.uint32))
    columns.setflags(write=False)
    return columns


def _rotate(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _scramble(word: Words) -> Words:
    return _rotate(word * _C1, 15) * _C2


def _turn(state: Words, scratch: Words | None = None) -> None:
    """Mix the state in place, after a word was xored into it."""
    right = np.right_shift(state, np.uint32(19), out=scratch)
    state <<= np.uint32(13)
    state |= right
    state *= _FIVE
    state += _ADD


def _last(state: Words, scratch: Words | None = None) -> Words:
    """Mix in place after the fourth word, then finalise as MurmurHash3 does."""
    _turn(state, scratch)
    state ^= _LENGTH
    state ^= np.right_shift(state, np.uint32(16), out=scratch)
    state *= np.uint32(0x85EBCA6B)
    state ^= np.right_shift(state, np.uint32(13), out=scratch)
    state *= np.uint32(0xC2B2AE35)
    state ^= np.right_shift(state, np.uint32(16), out=scratch)
    return state


class Scratch(threading.local):
    """Reused arrays, a set for each thread: allocating them anew costs more than computing in
    them."""

    def take(self, name: str, shape: tuple[int, ...], kind: DTypeLike) -> NDArray[Any]:
        """An array of this shape and type with undefined content; a name goes with one type."""
        size = math.prod(shape)
        array = self.__dict__.get(name)
        if array is None or array.size < size:
            array = self.__dict__[name] = np.empty(size, kind)
        return array[:size].reshape(shape)


SCRATCH = Scratch()


def blocks(rows: int, vocab: int, size: int = BLOCK) -> Iterator[slice]:
    """Slices of rows that hold at most ``size`` scores each, but at least one row."""
    step = max(1, size // max(1, vocab))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))
