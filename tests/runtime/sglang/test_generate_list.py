"""Many requests as one: each item's answer as it comes, one that is refused, one that fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from runtime.servers.remote_server import ServerTimes
from runtime.servers.server_errors import ReplicaLost
from runtime.sglang.generate_list import as_list, generate_list
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import SearchSession
from search.engine import EngineDown, EngineError
from tests.runtime.sglang.one_server import answering

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
REFUSED = b'HTTP/1.1 400 Bad\r\ncontent-length: 28\r\n\r\n{"error":{"message":"Why?"}}'


def event(said: Json) -> bytes:
    """As SGLang's orjson writes it."""
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def item(index: int, **finish: Any) -> bytes:
    """An item that is done; without a finish one that is not."""
    return event({"index": index, "meta_info": {"finish_reason": finish or None}})


def done(*indices: int) -> bytes:
    """Items that are done, in this order, each after a first token."""
    return b"".join(item(index) + item(index, type="stop") for index in indices)


def bodies(many: int, **more: Any) -> list[dict[str, Any]]:
    """Of single requests."""
    return [{"rid": f"s-{n}", "input_ids": [n], **more} for n in range(many)]


async def sent(replica: Replica, asked: list[dict[str, Any]], waits: int = 1) -> list[int]:
    """The places answered, in the order in which they were."""
    places: list[int] = []
    replica.full_waits = lambda: (0.0,) * waits
    await generate_list(replica, asked, lambda at, _: places.append(at))
    return places


@pytest.mark.promise(
    "On SGLang an item of a list that fails fails its own call, and a round's hint is told once"
)
def test_a_list_names_every_field_an_item() -> None:
    """But the priority, of which SGLang takes one for all."""
    assert as_list(bodies(2, priority=3)) == {
        "rid": ["s-0", "s-1"],
        "input_ids": [[0], [1]],
        "priority": 3,
        "stream": True,
    }


async def test_items_are_answered_as_they_are_done() -> None:
    """One request; what is told of an item before its end is passed over."""
    async with answering(lambda _: HEAD + done(2, 0, 1) + b"data: [DONE]\n\n") as (replica, heard):
        assert await sent(replica, bodies(3)) == [2, 0, 1]
        assert [body["rid"] for _, body in heard] == [["s-0", "s-1", "s-2"]]
        assert replica.under_way == 0


async def test_what_a_full_server_refuses_is_sent_again() -> None:
    """The whole list, and later one item of it alone: each time under ids of their own, since two
    seconds after a list's answer SGLang stops what is at work under an id of it."""
    full = item(1, type="abort", status_code=503, message="The request queue is full.")
    answers = {1: BUSY, 2: HEAD + done(0) + full, 3: HEAD + done(0)}
    async with answering(answers.__getitem__) as (replica, heard):
        assert await sent(replica, bodies(2), waits=2) == [0, 1]
        again = [["s-0", "s-1"], ["+s-0", "+s-1"], ["++s-1"]]
        assert [body["rid"] for _, body in heard] == again
    async with answering(lambda _: BUSY) as (replica, heard):
        with pytest.raises(EngineDown, match="is full"):
            await sent(replica, bodies(1))
        assert (len(heard), replica.up) == (2, True)


async def test_a_connection_that_ends_is_taken_up_once() -> None:
    """What is left goes under ids of its own; a server that ends a list again is lost."""
    answers = {1: HEAD.replace(b"close", b"x\r\ncontent-length: 999") + done(1), 2: HEAD + done(0)}
    async with answering(answers.__getitem__) as (replica, heard):
        assert await sent(replica, bodies(2)) == [1, 0]
        # SGLang stops what begins with the id of who has gone
        assert heard[1][1]["rid"] == ["+s-0"]
    async with answering(lambda _: HEAD + done(1)) as (replica, heard):
        with pytest.raises(ReplicaLost, match="ended a list"):
            await sent(replica, bodies(2))
        assert not replica.up


@pytest.mark.parametrize("end", [b"content-length: 999", b"transfer-encoding: chunked"])
async def test_a_connection_that_ends_after_the_last_answer_has_answered(end: bytes) -> None:
    """Nothing is left to be sent again, and no server is lost by it."""
    whole = done(0, 1)
    if b"chunked" in end:
        whole = b"%x\r\n%b\r\n7\r\n\xff" % (len(whole), whole)
    head = HEAD.replace(b"close", b"x\r\n" + end)
    async with answering(lambda _: head + whole) as (replica, heard):
        assert await sent(replica, bodies(2)) == [0, 1]
        assert (len(heard), replica.up, replica.under_way) == (1, True, 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HEAD + item(0, type="abort", status_code=400, message="too long"), "too long"),
        (HEAD + item(1, type="abort"), "aborted"),
        (HEAD + event({"error": {"message": "bad"}}), "refused a request: bad"),
        (REFUSED, "refused a request: Why"),
    ],
)
async def test_a_failure_is_the_calls(answer: bytes, said: str) -> None:
    """The server is well."""
    async with answering(lambda _: answer) as (replica, _):
        with pytest.raises(EngineError, match=said):
            await sent(replica, bodies(2))
        assert replica.up


async def test_one_list_a_priority() -> None:
    """The dearest first, where a server evicts by what a request came with."""
    async with answering(lambda _: HEAD + done(0)) as (replica, heard):
        mixed = [body | {"priority": n} for n, body in enumerate(bodies(2))]
        assert sorted(await sent(replica, mixed)) == [0, 1]
        assert sorted(body["priority"] for _, body in heard) == [0, 1]


async def test_an_item_that_is_answered_is_not_stopped() -> None:
    """Ids are kept until their answers are there, and those of a call that was cancelled."""
    hanging = HEAD.replace(b"close", b"x\r\ncontent-length: 9999") + done(0)
    gate = asyncio.Event()
    async with answering(lambda _: hanging) as (replica, _):
        search = SearchSession("t", "t-", PluginNotes("t"))
        call = search.send_list(replica, [{"input_ids": [0]}] * 2, lambda *_: gate.set())
        task = asyncio.create_task(call)
        await gate.wait()
        (left,) = search.requests
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert left.startswith("t-")


async def test_a_list_is_stopped_by_one_request() -> None:
    """By the first of its items that has no answer yet, with whose id the others' begin; of items
    by two priorities, which are two lists, each by its own, and behind a router each by itself."""
    search = SearchSession("t", "t-", PluginNotes("t"))
    stopped: list[str] = []

    class Listening(Replica):
        async def abort(self, rid: str) -> None:
            stopped.append(rid)

    replica = Listening("http://127.0.0.1:9", ServerTimes(1, 1, 1, 1))
    with search.request_list(replica, [0, 7, 0, 7, 0]) as rids, search.request(replica) as alone:
        search.answered(rids[0])
        await search.stop()
    assert stopped == [rids[1], rids[2], alone]
    assert rids[4].startswith(rids[2])
    assert rids[3].startswith(rids[1])
    assert not any(rid.startswith((rids[0], rids[1])) for rid in (alone,))
    assert not rids[0].startswith(rids[1])
    assert not rids[1].startswith(rids[0])
    with search.request_list(replica, range(3)) as rids:
        assert len({rid.rstrip(".") for rid in rids}) == 3
    await replica.close()
