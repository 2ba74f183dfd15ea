"""Many requests sent as one list: answers by item, refused items, failures, aborts."""

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


def event(message: Json) -> bytes:
    """A server-sent event with JSON as SGLang's orjson writes it."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def item(index: int, **finish: Any) -> bytes:
    """The event of an item that is done with this ``finish``, or not done without one."""
    return event({"index": index, "meta_info": {"finish_reason": finish or None}})


def done(*indices: int) -> bytes:
    """Events of items done in this order, each with an unfinished event before."""
    return b"".join(item(index) + item(index, type="stop") for index in indices)


def bodies(many: int, **more: Any) -> list[dict[str, Any]]:
    """Bodies of ``many`` single requests."""
    return [{"rid": f"s-{n}", "input_ids": [n], **more} for n in range(many)]


async def send_all(replica: Replica, requests: list[dict[str, Any]], waits: int = 1) -> list[int]:
    """Send the requests as one list; the places answered, in order of the answers."""
    places: list[int] = []
    replica.full_waits = lambda: (0.0,) * waits
    await generate_list(replica, requests, lambda at, _: places.append(at))
    return places


@pytest.mark.promise(
    "A list request to SGLang has one value for each item in every field but `priority`, which all "
    "items share."
)
def test_a_list_names_every_field_an_item() -> None:
    """A list has one value for each item in every field but ``priority``, which SGLang shares."""
    assert as_list(bodies(2, priority=3)) == {
        "rid": ["s-0", "s-1"],
        "input_ids": [[0], [1]],
        "priority": 3,
        "stream": True,
    }


async def test_items_are_answered_as_they_are_done() -> None:
    """A list is one request; events of unfinished items are ignored."""
    async with answering(lambda _: HEAD + done(2, 0, 1) + b"data: [DONE]\n\n") as (replica, calls):
        assert await send_all(replica, bodies(3)) == [2, 0, 1]
        assert [body["rid"] for _, body in calls] == [["s-0", "s-1", "s-2"]]
        assert replica.under_way == 0


async def test_an_item_that_is_answered_twice_counts_once() -> None:
    """The first answer counts, and the others are still waited for."""
    async with answering(lambda _: HEAD + done(1, 1, 0)) as (replica, calls):
        assert await send_all(replica, bodies(2)) == [1, 0]
        assert (len(calls), replica.under_way) == (1, 0)


async def test_what_a_full_server_refuses_is_sent_again() -> None:
    """The list, and later a single item, is sent again under new ids each time, because SGLang
    stops requests under a list's ids two seconds after its answer."""
    full = item(1, type="abort", status_code=503, message="The request queue is full.")
    answers = {1: BUSY, 2: HEAD + done(0) + full, 3: HEAD + done(0)}
    async with answering(answers.__getitem__) as (replica, calls):
        assert await send_all(replica, bodies(2), waits=2) == [0, 1]
        again = [["s-0", "s-1"], ["+s-0", "+s-1"], ["++s-1"]]
        assert [body["rid"] for _, body in calls] == again
    async with answering(lambda _: BUSY) as (replica, calls):
        with pytest.raises(EngineDown, match="is full"):
            await send_all(replica, bodies(1))
        assert (len(calls), replica.up) == (2, True)


async def test_a_connection_that_ends_is_taken_up_once() -> None:
    """Unanswered items are sent again under new ids; a server that ends a list twice is lost."""
    answers = {1: HEAD.replace(b"close", b"x\r\ncontent-length: 999") + done(1), 2: HEAD + done(0)}
    async with answering(answers.__getitem__) as (replica, calls):
        assert await send_all(replica, bodies(2)) == [1, 0]
        # SGLang stops requests whose ids begin with that of a client that is gone
        assert calls[1][1]["rid"] == ["+s-0"]
    async with answering(lambda _: HEAD + done(1)) as (replica, calls):
        with pytest.raises(ReplicaLost, match="ended a list"):
            await send_all(replica, bodies(2))
        assert not replica.up


@pytest.mark.parametrize("end", [b"content-length: 999", b"transfer-encoding: chunked"])
async def test_a_connection_that_ends_after_the_last_answer_has_answered(end: bytes) -> None:
    """A connection that breaks after the last answer sends nothing again and loses no server."""
    whole = done(0, 1)
    if b"chunked" in end:
        whole = b"%x\r\n%b\r\n7\r\n\xff" % (len(whole), whole)
    head = HEAD.replace(b"close", b"x\r\n" + end)
    async with answering(lambda _: head + whole) as (replica, calls):
        assert await send_all(replica, bodies(2)) == [0, 1]
        assert (len(calls), replica.up, replica.under_way) == (1, True, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HEAD + item(0, type="abort", status_code=400, message="too long"), "too long"),
        (HEAD + item(1, type="abort"), "aborted"),
        (HEAD + event({"error": {"message": "bad"}}), "refused a request: bad"),
        (REFUSED, "refused a request: Why"),
    ],
)
async def test_a_failure_is_the_calls(answer: bytes, message: str) -> None:
    """An item's failure is the call's error and leaves the server up."""
    async with answering(lambda _: answer) as (replica, _):
        with pytest.raises(EngineError, match=message):
            await send_all(replica, bodies(2))
        assert replica.up


async def test_one_list_a_priority() -> None:
    """Requests of different priorities are sent as one list for each priority."""
    async with answering(lambda _: HEAD + done(0)) as (replica, calls):
        mixed = [body | {"priority": n} for n, body in enumerate(bodies(2))]
        assert sorted(await send_all(replica, mixed)) == [0, 1]
        assert sorted(body["priority"] for _, body in calls) == [0, 1]


async def test_an_item_that_is_answered_is_not_stopped() -> None:
    """Only ids without an answer stay listed for an abort, also after a cancelled call."""
    hanging = HEAD.replace(b"close", b"x\r\ncontent-length: 9999") + done(0)
    gate = asyncio.Event()
    async with answering(lambda _: hanging) as (replica, _):
        search = SearchSession("t", "t-", PluginNotes("t"))
        call = search.send_list(replica, [{"input_ids": [0]}] * 2, lambda *_: gate.set())
        task = asyncio.create_task(call)
        await gate.wait()
        (unanswered,) = search.requests
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert unanswered.startswith("t-")


async def test_a_list_is_stopped_by_one_request() -> None:
    """An abort names the list's first unanswered item, whose id is a prefix of the others' ids. A
    second priority is a second list with an abort of its own, and so is a single request."""
    search = SearchSession("t", "t-", PluginNotes("t"))
    stopped: list[str] = []

    class Listening(Replica):
        async def abort(self, rid: str) -> None:
            stopped.append(rid)

    replica = Listening("http://127.0.0.1:9", ServerTimes(1, 1, 1, 1))
    with search.request_list(replica, [0, 7, 0, 7, 0]) as rids, search.request(replica) as alone:
        search.forget(rids[0])
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
