"""Vectors of hashed character n-grams: no model is needed, and all processes get the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SIZE = 512
"""Entries of a vector."""

GRAMS = (2, 3)
"""Lengths of the n-grams, in characters."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def embed_texts(texts: Sequence[str]) -> list[tuple[float, ...]]:
    """Counts of each text's n-grams, folded into SIZE entries with signs by a hash.

    Case and the kind and amount of white space do not matter; a text of nothing else is all zeros.
    """
    if not texts:
        return []
    padded = [f" {' '.join(text.lower().split())} " if text.strip() else "" for text in texts]
    letters = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    row = np.repeat(np.arange(len(padded)), [len(text) for text in padded])
    counts = np.zeros(len(padded) * SIZE)
    for size in GRAMS:
        last = len(letters) - size + 1
        if last < 1:
            continue
        whole = row[:last] == row[size - 1 :]
        hashes = np.full(last, size, dtype=np.uint64)
        for at in range(size):
            hashes = _mix(hashes ^ letters[at : at + last])
        entry = (hashes >> np.uint64(1)) % np.uint64(SIZE)
        sign = np.where(hashes & np.uint64(1), 1.0, -1.0)
        place = row[:last] * SIZE + entry.astype(np.int64)
        counts += np.bincount(place[whole], weights=sign[whole], minlength=len(counts))
    return [tuple(vector) for vector in counts.reshape(len(padded), SIZE).tolist()]


def _mix(words: np.ndarray) -> np.ndarray:
    """Mix 64-bit words so that each bit of a word affects all of its bits."""
    words = (words ^ (words >> np.uint64(32))) * _FACTOR
    return words ^ (words >> np.uint64(29))
