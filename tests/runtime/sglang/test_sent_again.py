"""Requests whose connection ends, servers that are full, and releases that get no answer."""

from __future__ import annotations

import asyncio

import pytest

from runtime.servers import waiting
from runtime.servers.fleet import Fleet
from runtime.servers.server_errors import ReplicaLost
from runtime.servers.waiting import full_waits
from tests.runtime.sglang.one_server import answering

FULL = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"meta_info":{}}'


async def test_a_request_that_is_sent_once_more_has_an_id_of_its_own() -> None:
    """SGLang refuses the id of a request that is still running, and when it notices that the client
    is gone it stops all requests whose ids begin with that id."""
    async with answering(lambda n: b"" if n == 1 else ANSWER) as (replica, requests):
        assert await replica.generate({"rid": "s1-01"}) == {"meta_info": {}}
        await replica.abort("s1-01")
    assert requests == [
        ("/generate", {"rid": "s1-01"}),
        ("/generate", {"rid": "+s1-01"}),
        ("/abort_request", {"rid": "s1-01"}),
    ]


async def test_an_abort_stops_what_was_sent_once_more() -> None:
    """An abort names both ids, since either may be at work on the server."""
    async with answering({1: b"", 2: None, 3: ANSWER, 4: ANSWER}.get) as (replica, requests):
        asking = asyncio.create_task(replica.generate({"rid": "s1-01"}))
        while len(requests) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await replica.abort("s1-01")
    aborts = [body["rid"] for path, body in requests if path == "/abort_request"]
    assert aborts == ["s1-01", "+s1-01"]


def test_the_waits_for_a_server_that_is_full() -> None:
    """Waits double up to 3.2 s and sum to the answer's time limit."""
    assert list(full_waits(7.0)) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 0.7])
    assert sum(full_waits(600.0)) == pytest.approx(600.0)
    assert max(full_waits(600.0)) == 3.2


async def test_who_finds_a_server_full_waits_until_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full server is retried until it answers; a lost one raises ReplicaLost."""
    monkeypatch.setattr(waiting, "LONGEST_WAIT", 0.001)
    monkeypatch.setattr(waiting, "FIRST_WAIT", 0.001)
    async with answering(lambda n: FULL if n < 30 else ANSWER) as (replica, requests):
        assert await replica.generate({"rid": "s1-01"}) == {"meta_info": {}}
        assert len(requests) == 30
    async with answering(lambda _: FULL) as (replica, requests):
        replica.up = False
        with pytest.raises(ReplicaLost):
            await replica.generate({"rid": "s1-01"})


async def test_a_release_does_not_wait_for_an_answer_as_a_step_does() -> None:
    """A release ends after the probe time, and a server too busy for it is not lost."""
    async with answering(lambda _: None, probe=0.1) as (replica, requests):
        replica.plugged = True
        fleet = Fleet("policy", [replica])
        fleet.place("t1", (1, 2))
        async with asyncio.timeout(30):
            await fleet.release("t1")
        assert [path for path, _ in requests] == ["/generate"]
        assert replica.up
