"""Ids of requests that are sent once more: SGLang refuses an id that it has under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RESENT_PREFIX = "+"
"""Begins the id of a request that is sent once more. SGLang may not have noticed yet that the first
one's connection is gone; when it does, it stops whatever begins with the first one's id."""


class SentAgain:
    """By a request's first id, the one that it was sent under last, until it is answered."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    @contextmanager
    def under(self, rids: Sequence[str], times: int = 1) -> Iterator[list[str]]:
        """Ids for requests that were sent so many times before, known until all are answered."""
        new_rids = [RESENT_PREFIX * times + rid for rid in rids]
        self._last.update(zip(rids, new_rids, strict=True))
        yield new_rids
        for rid in rids:
            self._last.pop(rid, None)

    def names(self, rid: str) -> tuple[str, ...]:
        """The ids under which a server may be at work on a request."""
        return tuple(dict.fromkeys((rid, self._last.get(rid, rid))))

    def clear(self) -> None:
        """Nothing is known of them any more."""
        self._last.clear()
