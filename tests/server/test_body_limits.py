"""BodyLimits on their way: they hold no place, and are bounded in time, number and bytes."""

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
        """So many bytes more."""
        self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": not last})
        await self.taken()

    async def leave(self) -> None:
        """The client goes."""
        self._messages.put_nowait({"type": "http.disconnect"})
        await self.taken()

    async def taken(self) -> None:
        """Until it has been seen to."""
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def refused(self) -> ApiError | None:
        """Why it was turned away."""
        error = self.task.exception() if self.task.done() else None
        assert isinstance(error, ApiError | None)
        return error


async def senders(bodies: BodyLimits, addresses: str) -> list[Sender]:
    """One by each address, in this order."""
    found = [Sender(bodies, address) for address in addresses]
    await found[-1].taken()
    return found


@pytest.mark.parametrize(
    ("addresses", "gone"),
    [
        ("abab", ""),
        ("aaba", "0"),
        ("aabaab", "01"),
        ("abacd", "0"),
        ("abacdb", "01"),
        ("abcde", "0"),
    ],
)
async def test_the_newest_is_let_in_at_the_cost_of_who_has_most(addresses: str, gone: str) -> None:
    """By hand, two for each address and four in all: over its own limit an address loses its
    oldest, over the limit of all the address that has most does."""
    bodies = BodyLimits(Settings(max_bodies=4, max_bodies_by_address=2))
    asked = await senders(bodies, addresses)
    refused = {i: sender.refused for i, sender in enumerate(asked) if sender.refused}
    assert "".join(map(str, refused)) == gone
    for error in refused.values():
        assert (error.status_code, error.code) == (429, "too_many_bodies")
        assert (error.headers or {})["retry-after"] == "5"
    for i, sender in enumerate(asked):
        if i not in refused:
            await sender.send(b"x", last=True)
            assert await sender.task == b"x"
    assert len(bodies) == 0


async def test_together_they_hold_so_many_bytes() -> None:
    """By hand: 3,000 in all. The 1,600 go when another's 1,500 come; small ones stay."""
    bodies = BodyLimits(Settings(max_bodies_bytes=3000))
    large, small, other = await senders(bodies, "abc")
    await large.send(b"x" * 1600)
    await small.send(b"x" * 10)
    await other.send(b"x" * 1500)
    assert large.refused is not None
    assert large.refused.code == "too_many_bodies"
    await small.send(b"yz", last=True)
    await other.send(b"", last=True)
    assert len(await small.task) == 12
    assert len(await other.task) == 1500


async def test_room_in_bytes_is_made_by_the_address_that_holds_most() -> None:
    """By hand, 1,000 in all: a's two small ones are more than b's one large, so a's go first."""
    bodies = BodyLimits(Settings(max_bodies_bytes=1024))
    first, second, large = await senders(bodies, "aab")
    await first.send(b"x" * 300)
    await second.send(b"x" * 310)
    await large.send(b"x" * 450)
    assert [sender.refused is not None for sender in (first, second, large)] == [False, True, False]
    await large.send(b"x" * 200, last=True)
    assert len(await large.task) == 650
    await first.leave()


@pytest.mark.parametrize("limits", [{"body_idle_seconds": 0.02}, {"body_seconds": 0.02}])
async def test_a_body_that_does_not_come_is_not_waited_for(limits: dict[str, float]) -> None:
    """Neither one that stalls nor one that trickles."""
    bodies = BodyLimits(Settings(**limits))
    (stalled,) = await senders(bodies, "a")
    while not stalled.task.done():
        if "body_seconds" in limits:
            await stalled.send(b"x")
        await asyncio.sleep(0)
    error = stalled.refused
    assert error is not None
    assert (error.status_code, error.code) == (408, "request_timeout")
    assert "0.02 s" in str(error.detail)
    assert (error.headers or {})["connection"] == "close"
    assert len(bodies) == 0


ACTS = st.sampled_from(["begin", "piece", "end", "leave", "cancel"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 5))))
def test_whatever_is_sent_nothing_is_counted_twice(acts: list[tuple[str, int]]) -> None:
    """Whoever begins, sends, ends, leaves or is cut off when: those that wait are those that are
    counted, within the limits, and a body that is whole is the bytes that were sent."""

    async def run() -> None:
        bodies = BodyLimits(Settings(max_bodies=4, max_bodies_by_address=2, max_bodies_bytes=2000))
        asked: list[tuple[Sender, list[bytes]]] = []
        for act, number in acts:
            if act == "begin":
                asked.append((Sender(bodies, "abc"[number % 3]), []))
                await asked[-1][0].taken()
            elif asked:
                sender, sent = asked[number % len(asked)]
                if act == "cancel":
                    sender.task.cancel()
                    await sender.taken()
                elif act == "leave":
                    await sender.leave()
                else:
                    if not sender.task.done():
                        sent.append(bytes([number]) * 300 * number)
                    await sender.send(sent[-1] if sent else b"", last=act == "end")
            assert len(bodies) == sum(not sender.task.done() for sender, _ in asked) <= 4
        for sender, _ in asked:
            sender.task.cancel()
        ends = await asyncio.gather(*(s.task for s, _ in asked), return_exceptions=True)
        for end, (_, sent) in zip(ends, asked, strict=True):
            whole = isinstance(end, bytes)
            assert not whole or end == b"".join(sent)
            assert whole or isinstance(end, ApiError | ClientLeft | asyncio.CancelledError)
        assert len(bodies) == 0

    asyncio.run(run())


async def opened(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which so much has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def head(length: int = len(BODY)) -> bytes:
    """Of a chat request."""
    said = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n"
    return f"{said}content-type: application/json\r\n\r\n".encode()


FEW = {"max_running": 2, "max_queued": 3, "max_bodies_by_address": 100, "body_idle_seconds": 600}


@pytest.mark.parametrize("settings", [FEW], indirect=True)
async def test_half_bodies_by_the_hundred_keep_nobody_out(app: FastAPI) -> None:
    """Three hundred from one address hold no place: a client that comes from there as well is
    answered. The oldest are told why they are not waited for, and cut; nothing stays of any."""
    count = app.state.service.metrics.registry.get_sample_value
    async with serving(app) as port:
        halves = [await opened(port, head() + BODY[:9]) for _ in range(300)]
        displaced = await asyncio.gather(*(reader.read() for reader, _ in halves[:200]))
        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in displaced)
        assert count("hedgerow_requests_arriving") == 100
        assert app.state.service.admission.open == 0
        reader, writer = await opened(port, head())
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, half in [*halves, (reader, writer)]:
            half.close()
        while count("hedgerow_requests_arriving"):
            await asyncio.sleep(0.001)
        assert app.state.service.admission.open == 0


@pytest.mark.parametrize("settings", [{"body_idle_seconds": 0.1}], indirect=True)
async def test_half_a_body_is_told_why_and_cut(app: FastAPI) -> None:
    """In OpenAI's shape; the connection is closed though the body is still to come."""
    async with serving(app) as port:
        reader, writer = await opened(port, head() + BODY[:9])
        said, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in said
    assert json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_body_in_crumbs_is_refused(app: FastAPI) -> None:
    """Chunks of one byte cost the server a hundred times what their bytes do; chunks of sixty-four
    are taken."""
    padded = BODY + b" " * 60_000
    start = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head())

    def chunks(size: int) -> bytes:
        pieces = [padded[at : at + size] for at in range(0, len(padded), size)]
        return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    async with serving(app) as port:
        answer = b"too small"  # a reset may overtake it
        with suppress(ConnectionError):
            crumbs, ended = await opened(port, start + chunks(1))
            answer = await crumbs.read()
            ended.close()
        assert b"too small" in answer
        whole, writer = await opened(port, start + chunks(64))
        assert (await whole.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("settings", [{"max_connections": 20, "max_width": 8}], indirect=True)
async def test_connections_that_say_nothing_keep_nobody_out(app: FastAPI) -> None:
    """Sixty of them: the oldest are closed, and the next client is answered."""
    async with serving(app) as port:
        silent = [await opened(port, b"") for _ in range(60)]
        assert [await reader.read() for reader, _ in silent[:39]] == [b""] * 39
        reader, writer = await opened(port, head() + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, one in [*silent, (reader, writer)]:
            one.close()


@pytest.mark.parametrize("settings", [{"head_seconds": 0.2}], indirect=True)
async def test_a_head_that_does_not_come_is_not_waited_for(app: FastAPI) -> None:
    """Nothing at all, half a head, half a head after an answer: each connection is closed. One that
    is kept after its answer is not, and serves the next request."""
    async with serving(app) as port:
        kept, writer = await opened(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await kept.readuntil(b"}")
        again, half = await opened(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await again.readuntil(b"}")
        half.write(b"GET /health HT")
        halves = [(again, half), await opened(port, b""), await opened(port, head()[:40])]
        assert await asyncio.gather(*(reader.read() for reader, _ in halves)) == [b""] * 3
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await kept.read()).startswith(b"HTTP/1.1 200 ")
        for _, one in [*halves, (kept, writer)]:
            one.close()
