"""A server in this process over the scripted engine, and clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from search.engine import Branch
from server.app import create_app, create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, encode

BASE = "http://hedgerow"


def question(text: str = "What is it?") -> list[ChatCompletionMessageParam]:
    """Messages with one question."""
    return [{"role": "user", "content": text}]


def saying(reply: str) -> Callable[[Branch], str]:
    """For plain completions: whatever is asked, ``reply`` is said, wherever a piece begins."""
    first: dict[int, int] = {}

    def say(branch: Branch) -> str:
        start = first.setdefault(branch.seed, len(branch.tokens))
        return reply[len(branch.tokens) - start :]

    return say


class PlainText:
    """A tokenizer whose tokens are characters, like the scripted engine's."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """One line a message."""
        return list(encode("".join(f"{m['role']}: {m['content']}\n" for m in messages)))

    def encode(self, text: str) -> list[int]:
        """The text alone."""
        return list(encode(text))


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> Settings:
    """The defaults; a test changes fields by indirect parameters."""
    return Settings(**getattr(request, "param", {}))


@pytest.fixture
def engine() -> ScriptedEngine:
    """A scripted engine that a test may set up before its first request."""
    return ScriptedEngine()


@pytest.fixture
def app(settings: Settings, engine: ScriptedEngine) -> FastAPI:
    """The app under test."""
    return create_app(create_service(settings, engine, PlainText()))


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client without sockets."""
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url=BASE, timeout=30
    ) as client:
        yield client


@pytest.fixture
def openai(http: httpx2.AsyncClient) -> AsyncOpenAI:
    """The real client of OpenAI's package, which retries nothing here."""
    return AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any", http_client=http, max_retries=0)


class Call:
    """One raw ASGI request whose answer can be watched as it comes, and whose client can leave."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Condition()
        self.left = asyncio.Event()
        self._body = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def body(self) -> bytes:
        """What has arrived so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        """Whether the body was ended properly."""
        last = self.sent[-1] if self.sent else {}
        return last.get("type") == "http.response.body" and not last.get("more_body")

    async def until(self, count: int, mark: bytes) -> None:
        """Wait until ``mark`` has arrived that often."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.body.count(mark) >= count)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        async with self.arrived:
            self.sent.append(message)
            self.arrived.notify_all()
