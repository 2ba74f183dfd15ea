"""The servers of one model: which one a search is on, and where it moves when that is lost."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from runtime.all_of import all_of
from runtime.servers.remote_server import RemoteServer
from runtime.servers.routing import Routing
from runtime.servers.server_errors import ReplicaLost, WrongServer
from runtime.servers.server_metrics import ServerMetrics
from runtime.servers.waiting import report_while
from search.engine import EngineDown

S = TypeVar("S", bound=RemoteServer)
T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two attempts to reach a server that is not there yet."""
MOST_FAULTS = 5
"""How often one request may get a server fault, or no answer in time, before it fails."""
SLACK = 1.25
"""A server gets at most so many times its even share of the searches."""


class Fleet(Generic[S]):
    """Servers of one model. A search stays on the server that has its KV.

    Searches over one prompt go to one server, by rendezvous hashing (Thaler and Ravishankar 1998),
    unless that has its share of searches already: then to the next one in the prompt's order
    (bounded loads, Mirrokni and others 2018).
    """

    def __init__(
        self,
        kind: str,
        replicas: Sequence[S],
        recovery: float = 0.0,
        routing: Routing | None = None,
    ) -> None:
        """``kind``: ``policy`` or ``reward``, for messages; ``recovery``: most seconds that a
        search waits for a server when all are lost; ``routing``: headers for routers."""
        self.kind = kind
        self.replicas = tuple(replicas)
        self.waiting = 0
        self._recovery = recovery
        self.routing = routing or Routing()
        self.moves = 0
        self.sent_again = 0
        self._places: dict[str, list[S]] = {}
        """The servers that each search has been on; it is on the last one."""

    def place(self, tree: str, prompt: Sequence[int]) -> S:
        """The server that a search is on, chosen at its first request and whenever that is lost.

        Raises EngineDown if none is up.
        """
        places = self._places.get(tree, [])
        if places and places[-1].up:
            return places[-1]
        up = self.up()
        self.moves += bool(places)
        counts = Counter(replicas[-1].url for replicas in self._places.values())
        most = math.ceil(SLACK * (len(self._places) + 1) / len(up))
        ranked = rendezvous(prompt, [replica.url for replica in up])
        target = next(url for url in ranked if counts[url] < most or url == ranked[-1])
        replica = next(replica for replica in up if replica.url == target)
        self._places[tree] = [*(place for place in places if place is not replica), replica]
        return replica

    def up(self) -> list[S]:
        """The servers that are up. Raises EngineDown if none is."""
        up = [replica for replica in self.replicas if replica.up]
        if not up:
            urls = ", ".join(replica.wrong or replica.url for replica in self.replicas)
            raise EngineDown(f"no {self.kind} server answers: {urls}")
        return up

    @property
    def kv_tokens(self) -> int:
        """The KV capacity of all servers together, in tokens."""
        return sum(replica.kv_tokens for replica in self.replicas)

    async def ask(
        self, tree: str, prompt: Sequence[int], work: Callable[[S], Coroutine[Any, Any, T]]
    ) -> T:
        """The result of ``work`` on the search's server; if that is lost, on another one, or on the
        same one when it is back.

        ``work`` keeps what it has received from a lost server, and asks only for the rest. Raises
        EngineDown if no server is back in time, or after ``MOST_FAULTS`` faults of the request.
        """
        faults = 0
        while True:
            replica = await self.reach(tree, prompt)
            try:
                with self.routing.of(tree):
                    return await replica.while_up(work(replica))
            except ReplicaLost as error:
                faults += error.suspect
                if faults > MOST_FAULTS:
                    raise
                self.sent_again += 1

    async def reach(self, tree: str, prompt: Sequence[int]) -> S:
        """``place``, but if no server is up, wait for one. Raises EngineDown if none is up within
        ``recovery`` seconds."""
        until = time.monotonic() + self._recovery
        while True:
            try:
                return self.place(tree, prompt)
            except EngineDown:
                if (remaining := until - time.monotonic()) <= 0:
                    raise
            await self._any_up(remaining)

    async def _any_up(self, seconds: float) -> None:
        """Wait until a server is up, at most ``seconds``."""
        self.waiting += 1
        waits = [asyncio.ensure_future(replica.until_up()) for replica in self.replicas]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waiting -= 1
            for wait in waits:
                wait.cancel()

    async def release(self, tree: str) -> None:
        """Forget a search that is over, and tell its servers that its KV may be freed."""
        places = [replica for replica in self._places.pop(tree, []) if replica.up]
        with self.routing.of(tree):
            await asyncio.gather(*(replica.release(tree) for replica in places))

    async def check(self) -> None:
        """Check every server that is thought to be up. Raises EngineDown if none is."""
        await asyncio.gather(*(replica.check() for replica in self.replicas if replica.up))
        self.up()

    async def metrics(self) -> ServerMetrics:
        """The sum of the metrics of the servers that answer."""
        return ServerMetrics.sum_of(await asyncio.gather(*map(_metrics_of, self.replicas)))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))


async def _metrics_of(replica: RemoteServer) -> ServerMetrics:
    """A server's metrics, all zero if it does not answer."""
    try:
        return await replica.metrics() if replica.up else ServerMetrics()
    except EngineDown:
        return ServerMetrics()


async def wait_for_all(fleets: Iterable[Fleet[Any]], seconds: float) -> None:
    """``wait_for`` each server of some fleets, all at once. Raises the first failure's error
    without waiting for the others."""
    replicas = [(replica, fleet.kind) for fleet in fleets for replica in fleet.replicas]
    await all_of(wait_for(replica, kind, seconds) for replica, kind in replicas)


async def wait_for(replica: RemoteServer, kind: str, seconds: float) -> None:
    """Wait until a server is ready and is the server needed; ``kind``: for messages.

    Raises ValueError at once if it is not the server needed, EngineDown after ``seconds``.
    """
    why = ""

    async def meet() -> None:
        nonlocal why
        replica.up = False  # so that a failed attempt is not logged as a loss
        while True:
            try:
                await replica.meet()
            except WrongServer:
                raise
            except EngineDown as error:
                why = str(error)
            else:
                replica.up = True
                return
            await asyncio.sleep(LOOK_SECONDS)

    def say(elapsed: float) -> None:
        reason = why or f"{replica.url} has not answered yet"
        log.warning(
            "waiting for a %s server, %.0f of up to %g s: %s", kind, elapsed, seconds, reason
        )

    try:
        async with asyncio.timeout(seconds):
            await report_while(meet(), say)
    except WrongServer as error:
        raise ValueError(f"{kind}_urls: {error}") from error
    except TimeoutError:
        reason = why or f"{replica.url} has not answered"
        raise EngineDown(f"no {kind} server: {reason}; waited {seconds:g} s for it") from None


def rendezvous(prompt: Sequence[int], names: Sequence[str]) -> list[str]:
    """The names in an order that depends on the prompt; removing one keeps the others' order."""
    key = b"".join(token.to_bytes(4, "little") for token in prompt)

    def weight(name: str) -> bytes:
        return hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)
