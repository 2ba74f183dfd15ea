"""A search under way on SGLang servers: its requests and hints.

SGLang tells no search's share of its KV: ``kv_tokens_peak`` is what the search's live steps hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from runtime.servers.remote_server import RemoteServer
from runtime.servers.request_costs import Path
from runtime.servers.served_search import ServedSearch
from runtime.sglang.generate_list import Take, generate_list
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.step_request import StepRequest

MORE = "."
"""What the id of a list's next item has behind that of the one before: SGLang stops every request
whose id begins with the one that is named, so that a list is stopped by its first one at work."""

_NUMBERS = count(1)


@dataclass(eq=False, slots=True)
class SearchSession(ServedSearch):
    """``name`` begins its requests' ids: of one length for all but a list's further items.

    ``fresh``: the paths in its policy server's cache that the last round has put there; ``scored``:
    by what steps a node is reached; ``early_rewards``: of paths as the reward model reads them,
    known before a round asks; ``following``: complete steps of chains, by their prefixes and seeds,
    until a round asks for them.
    """

    name: str
    notes: PluginNotes
    requests: dict[str, Replica] = field(default_factory=dict)
    fresh: set[Path] = field(default_factory=set, init=False)
    openings: set[Path] = field(default_factory=set)
    scored: dict[tuple[Path, ...], int] = field(default_factory=dict)
    early_rewards: dict[Path, float] = field(default_factory=dict)
    following: dict[tuple[Path, int], StepRequest] = field(default_factory=dict)

    def common(self, rid: str) -> dict[str, Any]:
        """What every request says beside its tokens."""
        return {"rid": rid} | ({"extra_key": self.namespace} if self.namespace else {})

    def on(self, server: RemoteServer) -> None:
        """As any; what is not cached there is not fresh either."""
        ServedSearch.on(self, server)
        self.fresh &= self.cached_paths

    def count_prefix(self, prefix: Path, answer: Json) -> None:
        """What a policy's request has cost that read a prefix."""
        cached = int(answer["meta_info"].get("cached_tokens") or 0)
        self.costs.read(len(prefix), cached, known=prefix in self.cached_paths)
        self.cached_paths.add(prefix)

    def count_step(self, prefix: Path, answer: Json, tokens: int) -> None:
        """What one has cost that drew so many tokens after a prefix."""
        self.count_prefix(prefix, answer)
        self.costs.add_decoded(len(prefix), tokens)

    @contextmanager
    def request(self, replica: Replica) -> Iterator[str]:
        """An id for a request, kept while the server may be at work on it."""
        with self.request_list(replica, [0]) as (rid,):
            yield rid

    @contextmanager
    def request_list(self, replica: Replica, lists: Sequence[int]) -> Iterator[list[str]]:
        """An id for each of several requests, by which of ``lists`` it goes in, kept until
        ``answered``, or until all are over."""
        following: dict[int, str] = {}
        rids: list[str] = []
        for list_id in lists:
            rids.append(following.get(list_id) or f"{self.name}{next(_NUMBERS):012x}")
            following[list_id] = rids[-1] + MORE
        self.requests.update(dict.fromkeys(rids, replica))
        try:
            yield rids
        except asyncio.CancelledError:
            raise  # the server does not know yet: whoever cancelled is to stop them
        except BaseException:
            self.end_requests(*rids)
            raise
        self.end_requests(*rids)

    def end_requests(self, *rids: str) -> None:
        """The server is not at work on these any more."""
        for rid in rids:
            self.requests.pop(rid, None)

    async def send_list(
        self, replica: Replica, bodies: Sequence[dict[str, Any]], take: Take
    ) -> None:
        """Have a server answer all of these in one request; ``take`` as in ``generate_list``."""
        by_priority = [body.get("priority", 0) for body in bodies]
        lists = range(len(bodies)) if replica.routed else by_priority
        with self.request_list(replica, lists) as rids:

            def take_answer(place: int, answer: Json) -> None:
                self.end_requests(rids[place])
                take(place, answer)

            list_bodies = [body | self.common(rid) for body, rid in zip(bodies, rids, strict=True)]
            await generate_list(replica, list_bodies, take_answer)

    async def stop(self) -> None:
        """Give up what is under way, here and on the servers; a list by one request."""
        await ServedSearch.stop(self)
        first_of_list: dict[str, tuple[str, Replica]] = {}
        for rid, replica in self.requests.items():
            first_of_list.setdefault(rid.rstrip(MORE), (rid, replica))
        self.requests.clear()
        at_work = first_of_list.values()
        await asyncio.gather(*(replica.abort(rid) for rid, replica in at_work if replica.up))
