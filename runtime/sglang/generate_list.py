"""Several requests to a server as one: a list, whose items are answered as each is done.

A list that is streamed tells of every item by itself: one that the server refuses or ends takes no
other with it, and what is done early is of use early.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import chain
from typing import Any

import httpx

from runtime.servers.server_errors import CUT_OFF, FULL
from runtime.sglang.replica import Json, Replica
from search.engine import EngineDown, EngineError

SHARED_FIELDS = frozenset({"priority"})
"""What SGLang takes once for a list."""
NO_END = b'"finish_reason":null'
"""In what is told of an item that is not done."""

Take = Callable[[int, Json], None]


async def generate_list(replica: Replica, bodies: Sequence[Json], take: Take) -> None:
    """Have ``/generate`` answer ``bodies`` in one request, or one for each priority among them.

    ``take`` gets each one's place and its answer, in the order in which they are done; each body
    has an id. Items that a full server refuses are sent again after its ``full_waits``. Raises as
    ``Replica.generate`` does, for the first item that fails; the others are given up then. A router
    takes no lists with parameters for each item: it gets one request for each.
    """
    if replica.routed:
        await _one_by_one(replica, bodies, take)
        return
    by_priority: dict[int, dict[int, Json]] = {}
    for place, body in enumerate(bodies):
        by_priority.setdefault(body.get("priority", 0), {})[place] = body
    lists = [_Items(replica, items, take) for _, items in sorted(by_priority.items(), reverse=True)]
    if len(lists) == 1:
        await lists[0].to_the_end()
        return
    await _together([items.to_the_end() for items in lists])


async def _one_by_one(replica: Replica, bodies: Sequence[Json], take: Take) -> None:
    async def generate(place: int, body: Json) -> None:
        take(place, await replica.generate(body))

    await _together([generate(place, body) for place, body in enumerate(bodies)])


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them; when one fails, the others are given up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def as_list(bodies: Sequence[Json]) -> dict[str, Any]:
    """The body that asks for all of these, which name the same fields."""
    first = bodies[0]
    shared = {name: first[name] for name in first if name in SHARED_FIELDS}
    lists = {name: [body[name] for body in bodies] for name in first if name not in SHARED_FIELDS}
    return lists | shared | {"stream": True}


class _Items:
    """The items of one list that have no answer yet, by their places."""

    def __init__(self, replica: Replica, items: dict[int, Json], take: Take) -> None:
        self._replica = replica
        self._remaining = items
        self._take = take
        self._attempts = 0

    async def to_the_end(self) -> None:
        """Until every item is answered."""
        self._replica.under_way += len(self._remaining)
        try:
            for wait in chain(self._replica.full_waits(), [None]):
                await self._send()
                if not self._remaining:
                    return
                if wait is not None:
                    await self._replica.wait_full(wait)
            raise EngineDown(f"{self._replica.url} is full")
        finally:
            self._replica.under_way -= len(self._remaining)

    async def _send(self) -> None:
        """Once, and what is left once more where the connection ends without a word. How it ends
        after the last answer is all the same."""
        try:
            try:
                await self._send_remaining()
            except CUT_OFF:
                if self._remaining:
                    await self._send_remaining()
        except httpx.HTTPError as error:
            if self._remaining:
                raise self._replica.lose(error) from error

    async def _send_remaining(self) -> None:
        """Each time under ids of their own: two seconds after a list's answer SGLang stops what is
        at work under an id of that list."""
        replica, bodies = self._replica, self._remaining.values()
        with replica.sent_again.under([body["rid"] for body in bodies], self._attempts) as rids:
            self._attempts += 1
            fresh_bodies = [{**body, "rid": rid} for body, rid in zip(bodies, rids, strict=True)]
            await self._stream(replica.schedule(fresh_bodies))

    async def _stream(self, bodies: Sequence[Json]) -> None:
        """Take what comes; what is left afterwards was refused by a full server."""
        places, refusals = list(self._remaining), 0
        async with self._replica.open_stream("/generate", as_list(bodies)) as response:
            if response.status_code in FULL:
                return
            async for answer in _answers(response):
                self._replica.mark_alive()
                if "error" in answer:
                    raise EngineError(f"SGLang refused a request: {answer['error']['message']}")
                finish = answer["meta_info"].get("finish_reason")
                if finish is None:
                    continue
                if finish.get("type") == "abort":
                    refusals += self._full(finish)
                    continue
                place = places[answer["index"]]
                del self._remaining[place]
                self._replica.under_way -= 1
                self._take(place, answer)
        if len(self._remaining) > refusals:
            raise self._replica.lose("it ended a list before its items")

    def _full(self, finish: Json) -> bool:
        """Whether an item is to be sent again. Raises ReplicaLost or EngineError if it is not."""
        status = finish.get("status_code") or 0
        if status in FULL:
            return True
        message = finish.get("message", "aborted")
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise self._replica.lose(f"status {status}: {message}")
        raise EngineError(f"SGLang ended a request: {message}")


async def _answers(response: httpx.Response) -> AsyncIterator[Json]:
    """What a stream of events tells of items that are done, or of an error."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            content = event.removeprefix(b"data: ")
            if NO_END not in content and content != b"[DONE]":
                yield json.loads(content)
