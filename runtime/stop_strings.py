"""Finds stop strings in decoded tokens.

A table says which tokens may complete a stop string. It is made in time linear in the bytes of the
stop strings and the vocabulary, and the tables used last are kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

TABLE_BYTES = 4 << 20
"""Most bytes of one vocabulary's tables together; the one used last is always kept."""


class StopStrings:
    """Tells whether a step's last token completes a stop string.

    The strings are searched in the step's own bytes, across token borders, and only if the last
    token's bytes could complete one. A token that completes a stop string and continues after it
    stays whole.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[bytes]) -> None:
        """``stops``: UTF-8, none empty. Made by ``StopStringTables``."""
        self._pieces = vocabulary.pieces
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        most = vocabulary.longest
        ends = {stop[at:] for stop in stops for at in range(max(1, len(stop) - most), len(stop))}
        possible = np.zeros(len(self._pieces), dtype=np.uint8)
        for end in ends:
            possible[vocabulary.beginning_with(end)] = 1
        for stop in stops:
            possible[vocabulary.containing(stop)] = 1
        self._possible = possible.tobytes()
        self.size = len(self._possible) + sum(map(len, stops))
        """Bytes that this table takes."""

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the step's tokens completes a stop string."""
        if not self._possible[tokens[-1]]:
            return False
        last = self._pieces[tokens[-1]]
        pieces, before = [last], 0
        for token in reversed(tokens[:-1]):
            if before >= self._longest - 1:
                break
            pieces.append(self._pieces[token])
            before += len(pieces[-1])
        joined = b"".join(reversed(pieces))
        return any(joined.find(stop, max(0, before + 1 - len(stop))) >= 0 for stop in self._stops)


class Vocabulary:
    """The bytes of all tokens, sorted so that those with a common beginning are adjacent."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces``: the bytes of each token id, special tokens by their own names."""
        self.pieces = pieces
        self.longest = max(map(len, pieces), default=0)
        self._ids = np.array(sorted(range(len(pieces)), key=pieces.__getitem__), dtype=np.int64)
        self._sorted = [pieces[token] for token in self._ids.tolist()]
        self._joined = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self._token = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(p) for p in pieces])

    def beginning_with(self, text: bytes) -> np.ndarray:
        """Ids (n,) of the tokens that begin with ``text``."""
        first = bisect_left(self._sorted, text)
        last = bisect_right(self._sorted, text, first, key=lambda piece: piece[: len(text)])
        return self._ids[first:last]

    def containing(self, text: bytes) -> np.ndarray:
        """Ids (n,) of the tokens that contain ``text``; one that does so repeatedly may recur."""
        at = np.flatnonzero(self._joined[: max(0, len(self._joined) + 1 - len(text))] == text[0])
        last = at + len(text) - 1
        at = at[self._token[at] == self._token[last]]
        for place in range(1, len(text)):
            if not len(at):
                break
            at = at[self._joined[at + place] == text[place]]
        return self._token[at]


class StopStringTables:
    """The tables of one vocabulary. Those used last are kept, up to ``most`` bytes."""

    def __init__(self, pieces: Sequence[bytes], most: int = TABLE_BYTES) -> None:
        """``pieces``: the bytes of each token id, special tokens by their own names."""
        self._vocabulary = Vocabulary(pieces)
        self._most = most
        self._tables: OrderedDict[tuple[str, ...], StopStrings] = OrderedDict()
        self.size = 0
        """Bytes of the tables that are kept."""

    def of(self, stops: tuple[str, ...]) -> StopStrings:
        """The table for these strings. Raises ValueError for one that is empty or not UTF-8."""
        table = self._tables.get(stops)
        if table is None:
            table = self._tables[stops] = StopStrings(self._vocabulary, encode_stops(stops))
            self.size += table.size
        self._tables.move_to_end(stops)
        while self.size > self._most and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self.size -= oldest.size
        return table


def encode_stops(stops: Sequence[str]) -> list[bytes]:
    """Stop strings in UTF-8. Raises ValueError for one that is empty or cannot be encoded."""
    if not all(stops):
        raise ValueError("stop: an empty string; at least one character is needed")
    try:
        return [stop.encode() for stop in stops]
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!a}"
        raise ValueError(f"stop: holds {half}, half a character; whole ones are needed") from None
