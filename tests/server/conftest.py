"""A server in this process over the scripted engine, and clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, ParamSpec

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import BaseModel

from runtime.tool_template import ToolTemplate
from search.engine import Branch
from server.app import create_app
from server.connections import Connections, guarded
from server.lifecycle import listen
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, decode, encode

P = ParamSpec("P")

BASE = "http://hedgerow"


def question(text: str = "What is it?") -> list[ChatCompletionMessageParam]:
    """Messages with one question."""
    return [{"role": "user", "content": text}]


def in_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """A test that waits for what never comes fails, after five seconds."""

    @wraps(test)
    async def bounded(*args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(5):
            await test(*args, **kwargs)

    return bounded


def saying(reply: str) -> Callable[[Branch], str]:
    """For plain completions: whatever is asked, ``reply`` is said, wherever a piece begins."""
    first: dict[int, int] = {}

    def say(branch: Branch) -> str:
        start = first.setdefault(branch.seed, len(branch.tokens))
        return reply[len(branch.tokens) - start :]

    return say


class PlainText:
    """A tokenizer whose tokens are characters, like the scripted engine's."""

    model_vocab = 0x110000
    tool_template = ToolTemplate(results=True)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        open_reply: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """One line a message, after those of the tools and before those of the calls in it."""
        lines = [f"tool: {tool['function']['name']}\n" for tool in tools or ()]
        for message in messages:
            lines.append(f"{message['role']}: {message['content']}\n")
            for call in message.get("tool_calls", ()):
                lines.append(f"call: {json.dumps(call['function'])}\n")
        text = "".join(lines)
        return list(encode(text[:-1] if open_reply else text))

    def encode(self, text: str) -> list[int]:
        """The text alone."""
        return list(encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """The same."""
        return self.encode(text)

    def encode_step(self, words: str, delimiter: str) -> list[int]:
        """The same."""
        return self.encode(words)

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters."""
        return decode(tokens)

    def piece(self, token: int) -> bytes:
        """The character's."""
        return decode([token]).encode()

    def spelling(self, token: int) -> bytes:
        """The same."""
        return self.piece(token)

    def another(self) -> PlainText:
        """It bears any number of users."""
        return self


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


def client_over(app: FastAPI) -> httpx2.AsyncClient:
    """A client of the app without sockets."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=BASE, timeout=60)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client without sockets."""
    async with client_over(app) as client:
        yield client


async def refusal(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], status: int = 400
) -> dict[str, Any]:
    """The error that a request gets, in OpenAI's shape."""
    headers = {"content-type": "application/json"}
    answer = await http.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.fixture
def openai(http: httpx2.AsyncClient) -> AsyncOpenAI:
    """The real client of OpenAI's package, which retries nothing here."""
    return AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any", http_client=http, max_retries=0)


async def chat(openai: AsyncOpenAI, words: str = "What is it?", **asked: Any) -> ChatCompletion:
    """The reply to a question; ``asked``: further fields of the request, OpenAI's and our own."""
    model, messages = asked.pop("model", "sprig"), asked.pop("messages", question(words))
    create = openai.chat.completions.create
    return await create(model=model, messages=messages, extra_body=asked)


async def chunks(openai: AsyncOpenAI, **asked: Any) -> list[ChatCompletionChunk]:
    """The stream of the reply to a question, likewise, to its end."""
    create = openai.chat.completions.create
    stream = await create(model="sprig", messages=question(), stream=True, extra_body=asked)
    return [chunk async for chunk in stream]


def joined(stream: Iterable[Any]) -> dict[int, str]:
    """What the chunks of a chat or of text completions add up to, by choice."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            said = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (said or "")
    return texts


def search_of(done: BaseModel) -> dict[str, Any]:
    """The response's own search object."""
    return (done.model_extra or {})["search"]


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """The app behind a socket of this machine, as the server has it; its port."""
    listener = listen("127.0.0.1", 0)
    settings = app.state.service.settings
    heads = guarded(Connections(settings.max_connections), settings.head_seconds)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", http=heads))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


class Call:
    """One raw ASGI request whose answer can be watched as it comes, and whose client can leave.

    Its body comes in ``pieces``, each a step of the event loop after the one before.
    """

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], *, pieces: int = 1) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Condition()
        self.left = asyncio.Event()
        sent = json.dumps(body).encode()
        cuts = [len(sent) * i // pieces for i in range(pieces + 1)]
        self._body = [sent[a:b] for a, b in pairwise(cuts)]
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
        if len(self._body) > 1:
            await asyncio.sleep(0)
        elif not self._body:
            await self.left.wait()
        if self.left.is_set():
            return {"type": "http.disconnect"}
        piece = self._body.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._body)}

    async def _send(self, message: Any) -> None:
        async with self.arrived:
            self.sent.append(message)
            self.arrived.notify_all()
