"""A request whose connection ends, and a server that is told something and says nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from runtime.sglang.fleet import Fleet
from runtime.sglang.replica import Replica

Heard = list[tuple[str, dict[str, Any]]]
"""What came in: paths and bodies."""
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"meta_info":{}}'


@asynccontextmanager
async def server(
    answer: Callable[[int], bytes | None], probe: float = 5
) -> AsyncIterator[tuple[Replica, Heard]]:
    """``answer``: what the n-th request gets before its connection ends; None: nothing ever."""
    heard: Heard = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length:")[2].split()[0])
        heard.append((head.split()[1], json.loads(await reader.readexactly(size))))
        said = answer(len(heard))
        if said is None:
            await reader.read()
        else:
            writer.write(said)
        writer.close()

    async with await asyncio.start_server(one, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        replica = Replica(url, connect=5, answer=600, probe=probe, stall=30)
        try:
            yield replica, heard
        finally:
            await replica.close()


async def test_a_request_that_is_sent_once_more_has_an_id_of_its_own() -> None:
    """SGLang refuses the id of a request that it has not given up yet, and once it notices that the
    client has gone, stops whatever begins with that id."""
    async with server(lambda n: b"" if n == 1 else ANSWER) as (replica, heard):
        assert await replica.generate({"rid": "s1-01"}) == {"meta_info": {}}
        await replica.abort("s1-01")
    assert heard == [
        ("/generate", {"rid": "s1-01"}),
        ("/generate", {"rid": "+s1-01"}),
        ("/abort_request", {"rid": "s1-01"}),
    ]


async def test_an_abort_stops_what_was_sent_once_more() -> None:
    """By both ids: nobody knows which of them the server is at work on."""
    async with server({1: b"", 2: None, 3: ANSWER, 4: ANSWER}.get) as (replica, heard):
        asking = asyncio.create_task(replica.generate({"rid": "s1-01"}))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await replica.abort("s1-01")
    aborts = [body["rid"] for path, body in heard if path == "/abort_request"]
    assert aborts == ["s1-01", "+s1-01"]


async def test_a_release_does_not_wait_for_an_answer_as_a_step_does() -> None:
    """A server that is too busy to hear it is not lost."""
    async with server(lambda _: None, probe=0.1) as (replica, heard):
        replica.plugged = True
        fleet = Fleet("policy", [replica])
        fleet.place("t1", (1, 2))
        async with asyncio.timeout(30):
            await fleet.release("t1")
        assert [path for path, _ in heard] == ["/generate"]
        assert replica.up
