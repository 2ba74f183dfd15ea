"""Bodies on their way: they hold no place, and are bounded in time, number and bytes."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from server.api_errors import ApiError, ClientLeft
from server.connections import BodyLimits
from server.settings import Settings
from tests.server.conftest import question, serving

BODY = json.dumps({"model": "sprig", "messages": question()}).encode()


class Sender:
    """One request's body, sent piece by piece."""

    def __init__(self, bodies: BodyLimits, address: str) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "headers": [], "client": (address, 1)}
        self.task = asyncio.create_task(bodies.whole(scope, self._messages.get))

    async def send(self, piece: bytes, *, last: bool = False) -> None:
        """Send these bytes."""
        self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": not last})
        await self.settle()

    async def leave(self) -> None:
        """Disconnect the client."""
        self._messages.put_nowait({"type": "http.disconnect"})
        await self.settle()

    async def settle(self) -> None:
        """Let the event loop run until the message has been handled."""
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def refusal(self) -> ApiError | None:
        """The error that the request was refused with, if any."""
        error = self.task.exception() if self.task.done() else None
        assert isinstance(error, ApiError | None)
        return error


async def senders(bodies: BodyLimits, addresses: str) -> list[Sender]:
    """Return one sender for each address, in this order."""
    group = [Sender(bodies, address) for address in addresses]
    await group[-1].settle()
    return group


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("abab", ""),
        ("aaba", "0"),
        ("aabaab", "01"),
        ("abacd", "0"),
        ("abacdb", "01"),
        ("abcde", "0"),
    ],
)
async def test_the_newest_is_let_in_at_the_cost_of_who_has_most(
    addresses: str, expected: str
) -> None:
    """By hand, two for each address and four in all: over its own limit an address loses its
    oldest, over the limit of all the address that has most does."""
    bodies = BodyLimits(Settings(max_bodies=4, max_bodies_by_address=2))
    group = await senders(bodies, addresses)
    refusals = {i: sender.refusal for i, sender in enumerate(group) if sender.refusal}
    assert "".join(map(str, refusals)) == expected
    for error in refusals.values():
        assert (error.status_code, error.code) == (429, "too_many_bodies")
        assert (error.headers or {})["retry-after"] == "5"
    for i, sender in enumerate(group):
        if i not in refusals:
            await sender.send(b"x", last=True)
            assert await sender.task == b"x"
    assert len(bodies) == 0


async def test_together_they_hold_so_many_bytes() -> None:
    """By hand, 3,000 in all: the 1,600 bytes go when another's 1,500 come; small ones stay."""
    bodies = BodyLimits(Settings(max_bodies_bytes=3000))
    large, small, other = await senders(bodies, "abc")
    await large.send(b"x" * 1600)
    await small.send(b"x" * 10)
    await other.send(b"x" * 1500)
    assert large.refusal is not None
    assert large.refusal.code == "too_many_bodies"
    await small.send(b"yz", last=True)
    await other.send(b"", last=True)
    assert len(await small.task) == 12
    assert len(await other.task) == 1500


async def test_room_in_bytes_is_made_by_the_address_that_holds_most() -> None:
    """By hand, 1,024 in all: a's two small ones exceed b's large one, so one of a's goes."""
    bodies = BodyLimits(Settings(max_bodies_bytes=1024))
    first, second, large = await senders(bodies, "aab")
    await first.send(b"x" * 300)
    await second.send(b"x" * 310)
    await large.send(b"x" * 450)
    assert [sender.refusal is not None for sender in (first, second, large)] == [False, True, False]
    await large.send(b"x" * 200, last=True)
    assert len(await large.task) == 650
    await first.leave()


@pytest.mark.parametrize("limits", [{"body_idle_seconds": 0.02}, {"body_seconds": 0.02}])
async def test_a_body_that_does_not_come_is_not_waited_for(limits: dict[str, float]) -> None:
    """A body that stalls, or one that trickles in, gets a 408."""
    bodies = BodyLimits(Settings(**limits))
    (stalled,) = await senders(bodies, "a")
    while not stalled.task.done():
        if "body_seconds" in limits:
            await stalled.send(b"x")
        await asyncio.sleep(0)
    error = stalled.refusal
    assert error is not None
    assert (error.status_code, error.code) == (408, "request_timeout")
    assert "0.02 s" in str(error.detail)
    assert (error.headers or {})["connection"] == "close"
    assert len(bodies) == 0


ACTS = st.sampled_from(["begin", "piece", "end", "leave", "cancel"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 5))))
def test_whatever_is_sent_nothing_is_counted_twice(acts: list[tuple[str, int]]) -> None:
    """Bodies begin, send, end, leave and are cancelled in any order: those that wait are those that
    are counted, within the limits, and a whole body is the bytes that were sent."""

    async def run() -> None:
        bodies = BodyLimits(Settings(max_bodies=4, max_bodies_by_address=2, max_bodies_bytes=2000))
        requests: list[tuple[Sender, list[bytes]]] = []
        for act, number in acts:
            if act == "begin":
                requests.append((Sender(bodies, "abc"[number % 3]), []))
                await requests[-1][0].settle()
            elif requests:
                sender, pieces = requests[number % len(requests)]
                if act == "cancel":
                    sender.task.cancel()
                    await sender.settle()
                elif act == "leave":
                    await sender.leave()
                else:
                    if not sender.task.done():
                        pieces.append(bytes([number]) * 300 * number)
                    await sender.send(pieces[-1] if pieces else b"", last=act == "end")
            assert len(bodies) == sum(not sender.task.done() for sender, _ in requests) <= 4
        for sender, _ in requests:
            sender.task.cancel()
        ends = await asyncio.gather(*(s.task for s, _ in requests), return_exceptions=True)
        for end, (_, pieces) in zip(ends, requests, strict=True):
            whole = isinstance(end, bytes)
            assert not whole or end == b"".join(pieces)
            assert whole or isinstance(end, ApiError | ClientLeft | asyncio.CancelledError)
        assert len(bodies) == 0

    asyncio.run(run())


async def connect(port: int, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    await writer.drain()
    return reader, writer


def head(length: int = len(BODY)) -> bytes:
    """Return the head of a chat request."""
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n"
    return f"{lines}content-type: application/json\r\n\r\n".encode()


LIMITS = {"max_running": 2, "max_queued": 3, "max_bodies_by_address": 100, "body_idle_seconds": 600}


@pytest.mark.parametrize("settings", [LIMITS], indirect=True)
async def test_half_bodies_by_the_hundred_keep_nobody_out(app: FastAPI) -> None:
    """Three hundred half bodies from one address hold no place: another client from there is
    answered. The oldest are told why they are cut, and none of them leaves anything behind."""
    count = app.state.service.metrics.registry.get_sample_value
    async with serving(app) as port:
        halves = [await connect(port, head() + BODY[:9]) for _ in range(300)]
        displaced = await asyncio.gather(*(reader.read() for reader, _ in halves[:200]))
        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in displaced)
        assert count("hedgerow_requests_arriving") == 100
        assert app.state.service.admission.open == 0
        reader, writer = await connect(port, head())
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, half in [*halves, (reader, writer)]:
            half.close()
        while count("hedgerow_requests_arriving"):
            await asyncio.sleep(0.001)
        assert app.state.service.admission.open == 0


@pytest.mark.parametrize("settings", [{"body_idle_seconds": 0.1}], indirect=True)
async def test_half_a_body_is_told_why_and_cut(app: FastAPI) -> None:
    """A 408 in OpenAI's shape; the connection is closed though the body is unfinished."""
    async with serving(app) as port:
        reader, writer = await connect(port, head() + BODY[:9])
        response_head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert response_head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in response_head
    assert json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_body_in_crumbs_is_refused(app: FastAPI) -> None:
    """Chunks of one byte cost the server a hundred times what their bytes do and are refused;
    chunks of sixty-four bytes are read."""
    padded = BODY + b" " * 60_000
    start = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head())

    def chunks(size: int) -> bytes:
        pieces = [padded[at : at + size] for at in range(0, len(padded), size)]
        return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    async with serving(app) as port:
        answer = b"too small"  # a connection reset may come before it
        with suppress(ConnectionError):
            crumb_reader, crumb_writer = await connect(port, start + chunks(1))
            answer = await crumb_reader.read()
            crumb_writer.close()
        assert b"too small" in answer
        whole_reader, writer = await connect(port, start + chunks(64))
        assert (await whole_reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("settings", [{"max_connections": 20, "max_width": 8}], indirect=True)
async def test_connections_that_say_nothing_keep_nobody_out(app: FastAPI) -> None:
    """Sixty silent connections: the oldest are closed, and the next client is answered."""
    async with serving(app) as port:
        silent = [await connect(port, b"") for _ in range(60)]
        assert [await reader.read() for reader, _ in silent[:39]] == [b""] * 39
        reader, writer = await connect(port, head() + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, open_writer in [*silent, (reader, writer)]:
            open_writer.close()


@pytest.mark.parametrize("settings", [{"head_seconds": 0.2}], indirect=True)
async def test_a_head_that_does_not_come_is_not_waited_for(app: FastAPI) -> None:
    """Nothing at all, half a head, half a head after an answer: each connection is closed. One that
    stays open after its answer serves the next request."""
    async with serving(app) as port:
        kept_reader, kept_writer = await connect(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await kept_reader.readuntil(b"}")
        reader, writer = await connect(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET /health HT")
        halves = [(reader, writer), await connect(port, b""), await connect(port, head()[:40])]
        assert await asyncio.gather(*(reader.read() for reader, _ in halves)) == [b""] * 3
        kept_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await kept_reader.read()).startswith(b"HTTP/1.1 200 ")
        for _, open_writer in [*halves, (kept_reader, kept_writer)]:
            open_writer.close()
