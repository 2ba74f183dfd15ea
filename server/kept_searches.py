"""Searches that clients can get by id: running ones, and finished ones for a while."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from server.admission import QueueSlot
from server.settings import Settings
from server.streams import event

HEARTBEAT = b": still searching\n\n"


class EventLog:
    """Server-sent events numbered from 0, for any number of readers."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._closed = False
        self._next_event = asyncio.Event()
        self.size = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, name: str, data: dict[str, Any], *, last: bool = False) -> None:
        """Keep an event and wake the readers."""
        if self._closed:
            return
        self._events.append(event(data, name, len(self._events)))
        self.size += len(self._events[-1])
        self._closed = last
        self._next_event.set()
        self._next_event = asyncio.Event()

    async def read(self, after: int, quiet_seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after number ``after``, future ones too, with heartbeats in between."""
        index = after + 1
        while True:
            while index < len(self._events):
                yield self._events[index]
                index += 1
            if self._closed:
                return
            try:
                async with asyncio.timeout(quiet_seconds):
                    await self._next_event.wait()
            except TimeoutError:
                yield HEARTBEAT


@dataclass(slots=True)
class KeptSearch:
    """A search: its ``task`` while it runs, its JSON ``document`` once it is done.

    ``owner``: the name of the key that asked for it. ``finished_at``: when it was done, in seconds
    of the store's clock. ``event_log``: the events of a background search.
    """

    owner: str
    created: int
    task: QueueSlot | asyncio.Task[Any] | None
    document: bytes = b""
    finished_at: float = 0.0
    event_log: EventLog | None = None

    @property
    def size(self) -> int:
        """The bytes kept once the search is done; 0 while it runs."""
        return (
            0
            if self.task is not None
            else len(self.document) + (self.event_log.size if self.event_log else 0)
        )


class SearchStore:
    """Keeps searches within limits of number, bytes and age. The key that keeps most makes room,
    with its oldest finished one, so that no key pushes out another's."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._searches: OrderedDict[str, KeptSearch] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        self._forget()
        return len(self._searches)

    def begin(
        self,
        search_id: str,
        owner: str,
        created: int,
        task: QueueSlot | asyncio.Task[Any] | None,
        event_log: EventLog | None = None,
    ) -> None:
        """Store a search that starts."""
        self._searches[search_id] = KeptSearch(owner, created, task, event_log=event_log)

    def finish(self, search_id: str, document: bytes) -> None:
        """Keep a finished search's document, unless the search was deleted while it ran."""
        search = self._searches.get(search_id)
        if search is None:
            return
        search.task, search.document, search.finished_at = None, document, self._clock()
        self._searches.move_to_end(search_id)
        self._bytes += search.size
        self._forget()

    def get(self, search_id: str, owner: str) -> KeptSearch | None:
        """A running or kept search; None if there is none or ``owner`` is not its owner."""
        self._forget()
        search = self._searches.get(search_id)
        return search if search is not None and search.owner == owner else None

    def remove(self, search_id: str) -> None:
        """Drop a search if it is there, and cancel it if it runs."""
        self._forget()
        search = self._searches.pop(search_id, None)
        if search is not None:
            self._bytes -= search.size
            if search.task is not None:
                search.task.cancel()

    def _forget(self) -> None:
        """Drop finished searches that are too old, too many or too large together."""
        oldest = self._clock() - self._settings.kept_seconds
        finished = {name: search for name, search in self._searches.items() if search.task is None}
        for name in [name for name, search in finished.items() if search.finished_at < oldest]:
            self._drop(name, finished)
        while finished:
            too_many = len(finished) > self._settings.kept_searches
            if not too_many and self._bytes <= self._settings.kept_bytes:
                break
            counts = Counter[str]()
            for search in finished.values():
                counts[search.owner] += 1 if too_many else search.size
            ((owner, _),) = counts.most_common(1)
            name = next(name for name, search in finished.items() if search.owner == owner)
            self._drop(name, finished)

    def _drop(self, name: str, finished: dict[str, KeptSearch]) -> None:
        self._bytes -= finished.pop(name).size
        del self._searches[name]
