"""A search in progress on SGLang servers: its requests and hints.

SGLang does not report a search's share of KV: ``kv_tokens_peak`` counts the search's live steps.
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
from runtime.sglang.step_request import Key, StepRequest

MORE = "."
"""Appended to an item's id for the id of the list's next item: SGLang aborts all requests whose ids
begin with the given one, so a list is stopped by the id of its first item at work."""

_NUMBERS = count(1)


@dataclass(eq=False, slots=True)
class SearchSession(ServedSearch):
    """Its requests' ids begin with ``name``, and have one length but for a list's further items.

    ``fresh``: the paths in its policy server's cache that the last round put there; ``scored``:
    nodes by their paths' steps; ``early_rewards``: by path as the reward model reads it, until a
    round asks; ``following``: later steps of chains by prefix and seed, until a round asks; a
    chain's last one is not complete.
    """

    name: str
    notes: PluginNotes
    requests: dict[str, Replica] = field(default_factory=dict)
    fresh: set[Path] = field(default_factory=set, init=False)
    openings: set[Path] = field(default_factory=set)
    scored: dict[tuple[Path, ...], int] = field(default_factory=dict)
    early_rewards: dict[Path, float] = field(default_factory=dict)
    following: dict[Key, StepRequest] = field(default_factory=dict)

    def common(self, rid: str) -> dict[str, Any]:
        """The fields of every request besides its tokens: its id and its cache namespace."""
        return {"rid": rid} | ({"extra_key": self.namespace} if self.namespace else {})

    def on(self, server: RemoteServer) -> None:
        """``ServedSearch.on``; paths that are not cached there are not fresh either."""
        ServedSearch.on(self, server)
        self.fresh &= self.cached_paths

    def count_prefix(self, prefix: Path, answer: Json) -> None:
        """Count the cost of a policy's request that read a prefix."""
        cached = int(answer["meta_info"].get("cached_tokens") or 0)
        self.costs.read(len(prefix), cached, was_cached=prefix in self.cached_paths)
        self.cached_paths.add(prefix)

    def count_step(self, prefix: Path, answer: Json, tokens: int) -> None:
        """Count the cost of a request that drew ``tokens`` tokens after a prefix."""
        self.count_prefix(prefix, answer)
        self.costs.add_decoded(len(prefix), tokens)

    @contextmanager
    def request(self, replica: Replica) -> Iterator[str]:
        """An id for a request, kept in ``requests`` while the server may be at work on it."""
        with self.request_list(replica, [0]) as (rid,):
            yield rid

    @contextmanager
    def request_list(self, replica: Replica, lists: Sequence[int]) -> Iterator[list[str]]:
        """An id for each of several requests, in ``requests`` until ``answered`` or until all
        are over; ``lists``: which list each one goes in."""
        following: dict[int, str] = {}
        rids: list[str] = []
        for list_id in lists:
            rids.append(following.get(list_id) or f"{self.name}{next(_NUMBERS):012x}")
            following[list_id] = rids[-1] + MORE
        self.requests.update(dict.fromkeys(rids, replica))
        try:
            yield rids
        except asyncio.CancelledError:
            raise  # the server does not know yet: ``stop`` must abort them
        except BaseException:
            self.forget(*rids)
            raise
        self.forget(*rids)

    def forget(self, *rids: str) -> None:
        """Forget requests on which the server is no longer at work."""
        for rid in rids:
            self.requests.pop(rid, None)

    async def send_list(
        self, replica: Replica, bodies: Sequence[dict[str, Any]], take: Take
    ) -> None:
        """Have a server answer ``bodies`` in one request; ``take`` as in ``generate_list``."""
        by_priority = [body.get("priority", 0) for body in bodies]
        lists = range(len(bodies)) if replica.routed else by_priority
        with self.request_list(replica, lists) as rids:

            def take_answer(place: int, answer: Json) -> None:
                self.forget(rids[place])
                take(place, answer)

            list_bodies = [body | self.common(rid) for body, rid in zip(bodies, rids, strict=True)]
            await generate_list(replica, list_bodies, take_answer)

    async def stop(self) -> None:
        """Cancel all work, here and on the servers; one abort request for each list."""
        await ServedSearch.stop(self)
        first_of_list: dict[str, tuple[str, Replica]] = {}
        for rid, replica in self.requests.items():
            first_of_list.setdefault(rid.rstrip(MORE), (rid, replica))
        self.requests.clear()
        at_work = first_of_list.values()
        await asyncio.gather(*(replica.abort(rid) for rid, replica in at_work if replica.up))
