"""Servers of one model: which one a search is on, and where it goes when that one is lost."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from runtime.sglang.plugin_notes import farewell
from runtime.sglang.replica import Replica, ReplicaLost
from search.engine import EngineDown

T = TypeVar("T")

SLACK = 1.25
"""A server takes at most so many times its share of the searches."""


class Fleet:
    """A search stays on the server that has its KV.

    Searches over one prompt go to one server, by rendezvous hashing (Thaler and Ravishankar 1998),
    unless it has its share of searches already: then to the next in that prompt's order (bounded
    loads, Mirrokni and others 2018).
    """

    def __init__(self, what: str, replicas: Sequence[Replica]) -> None:
        """``what`` the servers are for, in words."""
        self.what = what
        self.replicas = tuple(replicas)
        self.moves = 0
        self.sent_again = 0
        self._places: dict[str, Replica] = {}

    def place(self, tree: str, prompt: Sequence[int]) -> Replica:
        """The server that a search is on, chosen at its first request and when that one is lost.

        Raises EngineDown if none is up.
        """
        at = self._places.get(tree)
        if at is not None and at.up:
            return at
        up = [replica for replica in self.replicas if replica.up]
        if not up:
            raise EngineDown(f"no {self.what} server answers: {', '.join(self.urls)}")
        self.moves += at is not None
        counts = Counter(replica.url for replica in self._places.values())
        most = math.ceil(SLACK * (len(self._places) + 1) / len(up))
        ranked = rendezvous(prompt, [replica.url for replica in up])
        chosen = next(url for url in ranked if counts[url] < most or url == ranked[-1])
        self._places[tree] = next(replica for replica in up if replica.url == chosen)
        return self._places[tree]

    @property
    def urls(self) -> list[str]:
        """Where the servers are."""
        return [replica.url for replica in self.replicas]

    @property
    def kv_tokens(self) -> int:
        """The capacity of their KV together."""
        return sum(replica.kv_tokens for replica in self.replicas)

    async def ask(
        self, tree: str, prompt: Sequence[int], work: Callable[[Replica], Awaitable[T]]
    ) -> T:
        """What ``work`` gets from the search's server; from another one if that one is lost.

        Nothing of a lost server's answer was seen, so ``work`` begins anew.
        """
        for _ in self.replicas[1:]:
            try:
                return await work(self.place(tree, prompt))
            except ReplicaLost:
                self.sent_again += 1
        return await work(self.place(tree, prompt))

    async def release(self, tree: str) -> None:
        """The search is over; a server with our plug-in is told so, and lets go of its KV."""
        at = self._places.pop(tree, None)
        if at is not None and at.plugged and at.up:
            await at.tell(farewell(tree))

    async def check(self) -> None:
        """Look at every server that is thought to be up. Raises EngineDown if none is."""
        await asyncio.gather(*(replica.check() for replica in self.replicas if replica.up))
        if not any(replica.up for replica in self.replicas):
            raise EngineDown(f"no {self.what} server answers: {', '.join(self.urls)}")

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))


def rendezvous(prompt: Sequence[int], names: Sequence[str]) -> list[str]:
    """The names in this prompt's own order: without one of them, the others keep theirs."""
    key = b"".join(token.to_bytes(4, "little") for token in prompt)

    def weight(name: str) -> bytes:
        return hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)
