"""The noise is SGLang's: MurmurHash3 of (seed, position, column), then Gumbel."""

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hedgerow_sglang.noise import Scratch, blocks, gumbel, hashes, hashes_of

MASK = 0xFFFFFFFF


def rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (32 - bits))) & MASK


def scramble(word: int) -> int:
    return rotate(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK


def finish(h: int, length: int) -> int:
    h ^= length
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32, written from Appleby's description."""
    h = seed
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        h = (rotate(h ^ scramble(word), 13) * 5 + 0xE6546B64) & MASK
    h ^= scramble(int.from_bytes(data[whole:], "little"))
    return finish(h, len(data))


def position_for(target: int, seed: int) -> int:
    """The position whose hash at column 0 is ``target``, by inverting the hash."""

    def undo_turn(h: int) -> int:
        return rotate((h - 0xE6546B64) * pow(5, -1, 2**32) & MASK, 19)

    def undo_shift(h: int, bits: int) -> int:
        return h ^ h >> bits ^ (h >> 2 * bits if 2 * bits < 32 else 0)

    h = undo_shift(target, 16) * pow(0xC2B2AE35, -1, 2**32) & MASK
    h = undo_shift(h, 13) * pow(0x85EBCA6B, -1, 2**32) & MASK
    h = undo_turn(undo_shift(h, 16) ^ 16)  # column 0 scrambles to 0
    before = 0
    for word in (seed & MASK, seed >> 32):
        before = (rotate(before ^ scramble(word), 13) * 5 + 0xE6546B64) & MASK
    word = undo_turn(h) ^ before
    word = rotate(word * pow(0x1B873593, -1, 2**32) & MASK, 17)
    return word * pow(0xCC9E2D51, -1, 2**32) & MASK


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"test", 0, 0xBA6BD213),
        (b"Hello, world!", 0, 0xC0363E43),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
    ],
)
def test_the_reference_is_murmur3(data, seed, expected):
    """The hash that this file compares with gives MurmurHash3's published values."""
    assert murmur3(data, seed) == expected


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    column=st.integers(0, 4000),
)
def test_hash_is_murmur3_of_four_words(seed, position, column):
    """Words in order: low half of the seed, high half, position, column."""
    words = struct.pack("<4I", seed & MASK, seed >> 32, position, column)
    assert hashes([seed], [position], column + 1)[0, column] == murmur3(words)


def test_gumbel_by_hand():
    """u = hash / (2^32 - 1), Gumbel = -log(-log u)."""
    words = struct.pack("<4I", 7, 3, 11, 2)
    u = murmur3(words) / (2**32 - 1)
    noise = gumbel([(3 << 32) | 7], [11], 5)
    assert noise.shape == (1, 5)
    assert noise[0, 2] == pytest.approx(-math.log(-math.log(u)), rel=1e-14)


def test_extreme_hashes_are_finite():
    """u = 1 and u = 0 are clamped: 32 log 2 at the top, -log(float64's greatest) at the bottom."""
    seed = 0x0123456789ABCDEF
    top, bottom = position_for(MASK, seed), position_for(0, seed)
    assert hashes([seed] * 2, [top, bottom], 1)[:, 0].tolist() == [MASK, 0]
    noise = gumbel([seed] * 2, [top, bottom], 1)[:, 0]
    assert noise[0] == pytest.approx(32 * math.log(2))
    assert noise[1] == pytest.approx(-math.log(np.finfo(np.float64).max))


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 5000)), min_size=1, max_size=40
    ),
    vocab=st.integers(1, 130),
)
def test_a_row_never_depends_on_others(rows, vocab):
    """Equal bits for a row alone and among others, whatever the shape."""
    seeds, positions = zip(*rows, strict=True)
    together = gumbel(seeds, positions, vocab)
    for i, (seed, position) in enumerate(rows):
        assert np.array_equal(together[i], gumbel([seed], [position], vocab)[0])


def test_a_column_never_depends_on_the_vocabulary():
    """A token's noise is the same in a longer vocabulary, as when a model's is padded."""
    assert np.array_equal(gumbel([5], [9], 1000)[0, :77], gumbel([5], [9], 77)[0])


def test_it_is_gumbel_noise():
    """Mean and variance over 200,000 variates are Euler's constant and pi^2 / 6."""
    noise = gumbel(range(200), range(200), 1000)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_a_tokens_own_hash_is_that_of_its_column():
    """A token's hash is the same when computed alone, in a row, or into reused arrays."""
    seeds, positions = np.array([5, 2**64 - 1], dtype=np.uint64), np.array([0, 7])
    whole = hashes(seeds, positions, 1000)
    tokens = np.array([999, 3])
    assert hashes_of(seeds, positions, tokens).tolist() == [whole[0, 999], whole[1, 3]]
    used = np.full((2, 1000), 7, dtype=np.uint32), np.full((2, 1000), 9, dtype=np.uint32)
    assert hashes(seeds, positions, 1000, *used) is used[0]
    assert np.array_equal(used[0], whole)


@given(st.integers(0, 50), st.integers(1, 500), st.integers(1, 2000))
@example(5, 1, 2)
def test_blocks_are_all_rows_in_turn(rows: int, vocab: int, size: int) -> None:
    """Only a block of one row exceeds ``size``, and all but the last are as large as allowed."""
    parts = list(blocks(rows, vocab, size))
    lengths = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(length == 1 or length * vocab <= size for length in lengths)
    assert all((length + 1) * vocab > size for length in lengths[:-1])


def test_scratch_is_the_same_memory_while_it_is_large_enough() -> None:
    """Scratch memory is shared by name, whatever the shape requested."""
    scratch = Scratch()
    first = scratch.take("hashes", (2, 3), np.uint32)
    assert (first.shape, first.dtype) == ((2, 3), np.uint32)
    first[:] = 7
    assert np.array_equal(scratch.take("hashes", (6,), np.uint32), [7] * 6)
    assert np.array_equal(scratch.take("hashes", (1, 5), np.uint32), [[7] * 5])
    assert scratch.take("hashes", (7, 1), np.uint32).shape == (7, 1)
    assert not np.shares_memory(scratch.take("shifted", (2, 3), np.uint32), first)
