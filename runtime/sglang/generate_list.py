"""Sends several requests to a server as one list, whose items are answered as each is done.

A streamed list answers each item separately: an item that the server refuses or ends does not
affect others, and early answers can be used early.
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
"""Fields that SGLang accepts only once for a whole list."""
NO_END = b'"finish_reason":null'
"""Part of every event about an item that is not done."""

Take = Callable[[int, Json], None]


async def generate_list(replica: Replica, bodies: Sequence[Json], take: Take) -> None:
    """Have ``/generate`` answer ``bodies`` in one request, or one for each priority among them.

    ``take`` gets each body's place and its answer, in the order of completion; each body must have
    an id. Items that a full server refuses are sent again after its ``full_waits``. Raises as
    ``Replica.generate`` does for the first item that fails, and gives up the others. A router does
    not accept lists with parameters for each item: it gets one request for each.
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
    """Run all coroutines; when one fails, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def as_list(bodies: Sequence[Json]) -> dict[str, Any]:
    """One streamed body for all of ``bodies``, which must have the same fields."""
    first = bodies[0]
    shared = {name: first[name] for name in first if name in SHARED_FIELDS}
    lists = {name: [body[name] for body in bodies] for name in first if name not in SHARED_FIELDS}
    return lists | shared | {"stream": True}


class _Items:
    """The items of one list that have no answer yet, by place."""

    def __init__(self, replica: Replica, items: dict[int, Json], take: Take) -> None:
        self._replica = replica
        self._remaining = items
        self._take = take
        self._attempts = 0

    async def to_the_end(self) -> None:
        """Send the items until each is answered. Raises EngineDown if the server stays full."""
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
        """Send the items once; if the connection is cut, send those that remain once more. How it
        ends after the last answer does not matter."""
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
        """Send the items that remain, with new ids each time: two seconds after a list's answer
        SGLang aborts whatever runs under an id of that list."""
        replica, bodies = self._replica, self._remaining.values()
        with replica.sent_again.under([body["rid"] for body in bodies], self._attempts) as rids:
            self._attempts += 1
            fresh_bodies = [{**body, "rid": rid} for body, rid in zip(bodies, rids, strict=True)]
            await self._stream(replica.schedule(fresh_bodies))

    async def _stream(self, bodies: Sequence[Json]) -> None:
        """Take the answers; the items that remain afterwards were refused by a full server."""
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
                if self._remaining.pop(place, None) is None:
                    continue  # its answer has come before
                self._replica.under_way -= 1
                self._take(place, answer)
        if len(self._remaining) > refusals:
            raise self._replica.lose("it ended a list before its items")

    def _full(self, finish: Json) -> bool:
        """True for an item that must be sent again; else raises ReplicaLost or EngineError."""
        status = finish.get("status_code") or 0
        if status in FULL:
            return True
        message = finish.get("message", "aborted")
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise self._replica.lose(f"status {status}: {message}")
        raise EngineError(f"SGLang ended a request: {message}")


async def _answers(response: httpx.Response) -> AsyncIterator[Json]:
    """The events of a stream that are answers of complete items, or errors."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            content = event.removeprefix(b"data: ")
            if NO_END not in content and content != b"[DONE]":
                yield json.loads(content)
