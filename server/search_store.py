"""Searches that can be asked for by id: running ones, and finished ones for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.feed import Feed
from server.settings import Settings


class Running(Protocol):
    """A search under way."""

    def cancel(self) -> object:
        """End it."""
        ...


@dataclass(slots=True)
class Kept:
    """A search: its ``task`` while it runs, its JSON ``document`` once it is done.

    ``owner`` is the key that asked for it; ``ended`` is when it was done, in seconds by the store's
    clock. ``feed``: the events of a background search.
    """

    owner: str
    created: int
    task: Running | None
    document: bytes = b""
    ended: float = 0.0
    feed: Feed | None = None

    @property
    def size(self) -> int:
        """Bytes kept of it once it is done."""
        return (
            0
            if self.task is not None
            else len(self.document) + (self.feed.size if self.feed else 0)
        )


class SearchStore:
    """Bounded in number, bytes and age; the oldest finished ones go first."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        self._forget()
        return len(self._kept)

    def begin(
        self,
        search_id: str,
        owner: str,
        created: int,
        task: Running | None,
        feed: Feed | None = None,
    ) -> None:
        """Note a search that starts."""
        self._kept[search_id] = Kept(owner, created, task, feed=feed)

    def finish(self, search_id: str, document: bytes) -> None:
        """Keep a finished search's document; one that was deleted meanwhile stays deleted."""
        kept = self._kept.get(search_id)
        if kept is None:
            return
        kept.task, kept.document, kept.ended = None, document, self._clock()
        self._kept.move_to_end(search_id)
        self._bytes += kept.size
        self._forget()

    def get(self, search_id: str, owner: str) -> Kept | None:
        """A search that runs or is still kept; to anybody but its owner there is none."""
        self._forget()
        kept = self._kept.get(search_id)
        return kept if kept is not None and kept.owner == owner else None

    def remove(self, search_id: str) -> Kept | None:
        """Forget a search and cancel it if it runs; None if there is no such search."""
        self._forget()
        kept = self._kept.pop(search_id, None)
        if kept is None:
            return None
        self._bytes -= kept.size
        if kept.task is not None:
            kept.task.cancel()
        return kept

    def _forget(self) -> None:
        """Drop finished searches that are too old, too many or too large together."""
        oldest = self._clock() - self._settings.kept_seconds
        finished = [name for name, kept in self._kept.items() if kept.task is None]
        for i, name in enumerate(finished):
            too_many = len(finished) - i > self._settings.kept_searches
            too_large = self._bytes > self._settings.kept_bytes
            if not (too_many or too_large or self._kept[name].ended < oldest):
                break
            self._bytes -= self._kept.pop(name).size
