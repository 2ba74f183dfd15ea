"""How much there is to parse in a JSON body, counted before anything is made of it."""

from __future__ import annotations

import numpy as np

QUOTE, BACKSLASH = b'"\\'
COMMAS, DIGITS = b",", b"0123456789"


def outside_strings(body: bytes, which: bytes) -> int:
    """How many of ``which`` bytes stand outside of the body's strings.

    What the body's parser would need tens of milliseconds for takes a few, beside other threads.
    """
    data = np.frombuffer(body, np.uint8)
    quotes = np.flatnonzero(data == QUOTE)
    quotes = quotes[~np.isin(quotes - 1, _escaping(data), assume_unique=True)]
    found = np.flatnonzero(np.isin(data, np.frombuffer(which, np.uint8)))
    before = np.searchsorted(quotes, found)  # quotes; after an odd number of them a string is open
    return int(np.count_nonzero(before % 2 == 0))


def at_most(body: bytes, which: bytes) -> int:
    """How many of ``which`` bytes there are, those in strings too: a cheap bound."""
    return len(body) - len(body.translate(None, which))


def _escaping(data: np.ndarray) -> np.ndarray:
    """Where backslashes stand that escape the next byte: each second one of a run is escaped."""
    slashes = np.flatnonzero(data == BACKSLASH)
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(first, append=len(slashes))
    return slashes[first + lengths - 1][lengths % 2 == 1]
