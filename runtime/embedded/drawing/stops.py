"""Finds stop strings in drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Tells whether a step's last token completes a stop string.

    The strings are looked for in the step's own bytes, across token borders; only tokens whose
    bytes could complete one are looked at closely. A token that completes a stop and goes on after
    it stays whole.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str]) -> None:
        """``pieces``: the bytes each token id stands for, special tokens by their own names.

        Raises ValueError for an empty stop string.
        """
        if not all(stops):
            raise ValueError("stop: an empty string; at least one character is needed")
        self._pieces = pieces
        self._stops = tuple(stop.encode() for stop in stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._candidates = {
            token
            for token, piece in enumerate(pieces)
            if any(_may_end(piece, s) for s in self._stops)
        }

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the step's tokens completes a stop string."""
        if tokens[-1] not in self._candidates:
            return False
        last = self._pieces[tokens[-1]]
        tail = b""
        for token in reversed(tokens[:-1]):
            if len(tail) >= self._longest - 1:
                break
            tail = self._pieces[token] + tail
        joined, first = tail + last, len(tail) + 1
        return any(joined.find(stop, max(0, first - len(stop))) >= 0 for stop in self._stops)


def _may_end(piece: bytes, stop: bytes) -> bool:
    return stop in piece or any(piece.startswith(stop[i:]) for i in range(1, len(stop)))
