"""Ids for requests that are sent again, because SGLang refuses the id of a running request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RESENT_PREFIX = "+"
"""Prefix of the id of a request that is sent again. SGLang may notice late that the first request's
connection is gone, and then aborts everything whose id begins with the first id."""


class SentAgain:
    """Maps a request's first id to the id that it was last sent under, until it is answered."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    @contextmanager
    def under(self, rids: Sequence[str], times: int = 1) -> Iterator[list[str]]:
        """New ids for requests that were sent ``times`` times, kept until all are answered."""
        new_rids = [RESENT_PREFIX * times + rid for rid in rids]
        self._last.update(zip(rids, new_rids, strict=True))
        yield new_rids
        for rid in rids:
            self._last.pop(rid, None)

    def names(self, rid: str) -> tuple[str, ...]:
        """The ids under which a server may be at work on a request."""
        return tuple(dict.fromkeys((rid, self._last.get(rid, rid))))

    def clear(self) -> None:
        """Forget all ids."""
        self._last.clear()
