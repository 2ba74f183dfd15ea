"""Many clients at once, many that leave, and an engine that keeps dying: no request is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Event
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from server.app import create_app
from server.assemble import running
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import question, saying, serving
from tests.server.test_process import QUESTION, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHAT = "/v1/chat/completions"
STREAMS = 500
LEAVERS = int(os.environ.get("LEAVERS", "1000"))
KILLS = int(os.environ.get("ENGINE_KILLS", "2"))
"""Times that the engine is killed under load; 50 take some minutes."""


async def open_chat(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, Any]:
    """Open a connection and send a chat request on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({"model": "sprig"} | body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.promise(
    "Each of 500 clients that stream at once gets its whole reply, and no search is left "
    "afterwards."
)
async def test_five_hundred_streams_at_once(app: FastAPI, engine: ScriptedEngine) -> None:
    """Every stream is whole, in order and ended properly."""
    reply = "".join(f"{i}," for i in range(100))
    engine.say = saying(reply)

    async def client(number: int) -> bytes:
        body = {"messages": question(f"{number}"), "stream": True, "seed": number}
        reader, writer = await open_chat(port, body)
        content = await reader.read()
        writer.close()
        return content

    async with serving(app) as port:
        contents = await asyncio.gather(*(client(number) for number in range(STREAMS)))
    for content in contents:
        assert b"data: [DONE]" in content
        assert "".join(re.findall(r'"content":"([^"]*)"', content.decode())) == reply
    assert not engine.live


@pytest.mark.promise(
    "Nothing is held for clients that leave, whenever they do: no KV and no task, and the server "
    "still answers."
)
async def test_a_thousand_clients_that_leave_hold_nothing() -> None:
    """Plain, searched, streamed, in the queue or running: whenever clients leave, no KV and no task
    of theirs remains, and the server answers as before."""
    draw = random.Random(0)
    settings = Settings(threads=1, kv_tokens=8192, prm_kv_tokens=8192, max_running=16)
    messages = [{"role": "user", "content": QUESTION}]
    room = asyncio.Semaphore(40)

    async def client(port: int, number: int) -> None:
        body: dict[str, Any] = {"messages": messages, "stream": bool(number % 2), "seed": number}
        body |= {"search": {"width": draw.choice([1, 4, 32])}} if number % 3 else {}
        async with room:
            reader, writer = await open_chat(port, body)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(draw.random() * 0.2):
                        await reader.read()
            finally:
                writer.transport.abort()

    async with running(settings) as parts:
        service = create_service(settings, parts.engine, parts.text)
        async with serving(create_app(service)) as port:
            before = asyncio.all_tasks()
            leavers = asyncio.gather(
                *(client(port, number) for number in range(LEAVERS)), return_exceptions=True
            )
            while service.admission.open or service.runner.under_way or not leavers.done():
                growing = sum(s.value for s in service.metrics.in_flight.collect()[0].samples)
                assert growing <= service.admission.running <= settings.max_running
                await asyncio.sleep(0.01)
            await leavers
            usage = await parts.engine.usage()
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0.05)
            reader, writer = await open_chat(port, {"messages": messages, "max_tokens": 8})
            with closing(writer):
                assert b"200 OK" in await reader.read()
    assert usage.kv_tokens_active == usage.prm_kv_tokens_active == 0
    assert usage.running == usage.waiting == 0


REPEATABLE: list[dict[str, Any]] = [
    {"model": "sprig", "messages": [{"role": "user", "content": QUESTION}]} | fields
    for fields in ({"seed": 5}, {"search": {"width": 4, "seed": 5}})
]
"""Requests that get the same reply every time."""


class Load:
    """Clients that send ``REPEATABLE`` requests until they are stopped, and count the answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stop = Event()
        self.answer_count = 0
        self.error_count = 0
        with httpx2.Client(base_url=url, timeout=300) as http:
            self.expected = [ask(http, body) for body in REPEATABLE]

    def client(self, number: int) -> None:
        """Send requests until stopped; every second client of each kind streams. Raises for
        anything but the right answer or an error in OpenAI's shape."""
        kind, request = number % 2, ask_streamed if number % 4 > 1 else ask
        with httpx2.Client(base_url=self.url, timeout=300) as http:
            while not self.stop.is_set():
                reply = request(http, REPEATABLE[kind])
                assert reply in (None, self.expected[kind])
                if reply is None:
                    self.error_count += 1
                else:
                    self.answer_count += 1


def ask(http: httpx2.Client, body: dict[str, Any]) -> str | None:
    """Return the reply's text, or None if the engine is down."""
    answer = http.post(CHAT, json=body)
    if answer.status_code == 200:
        return answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["error"]["code"] == "engine_unavailable"
    return None


def ask_streamed(http: httpx2.Client, body: dict[str, Any]) -> str | None:
    """The same for a stream, which ends with [DONE], or is cut after an error event."""
    events: list[str] = []
    with (
        http.stream("POST", CHAT, json=body | {"stream": True}) as lines,
        suppress(httpx2.RemoteProtocolError),
    ):
        for line in lines.iter_lines():
            events += [line.removeprefix("data: ")] if line else []
    if events[-1] != "[DONE]":
        assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
        return None
    deltas = [c["delta"] for line in events[:-1] for c in json.loads(line)["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.promise(
    "Every request gets its right answer or a clear error, never a wrong answer, when the engine "
    "dies under load."
)
def test_the_engine_is_killed_under_load() -> None:
    """Several times: every request gets its right answer, or an error that says what happened;
    readiness turns red and then green again."""
    server = Server(watchdog_seconds="0.2")
    load = Load(server.url)
    with httpx2.Client(base_url=server.url, timeout=300) as http, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load.client, number) for number in range(4)]
        try:
            for _ in range(KILLS):
                before = load.answer_count
                while load.answer_count < before + 4 and not any(c.done() for c in clients):
                    assert http.get("/health").status_code == 200
                os.kill(server.engine, signal.SIGKILL)
                for status in (503, 200):
                    while http.get("/ready").status_code != status:
                        pass
        finally:
            load.stop.set()
        for client in clients:
            client.result()
    assert server.stop() == 0
    assert load.error_count > 0
