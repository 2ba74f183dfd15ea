"""A server over the scripted engine in this process, and clients for it."""

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
    """Return messages with one question."""
    return [{"role": "user", "content": text}]


def in_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Let a test fail after five seconds instead of waiting forever."""

    @wraps(test)
    async def bounded(*args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(5):
            await test(*args, **kwargs)

    return bounded


def saying(reply: str) -> Callable[[Branch], str]:
    """Return a script that continues ``reply`` from wherever a piece begins, for any prompt."""
    starts: dict[int, int] = {}

    def say(branch: Branch) -> str:
        start = starts.setdefault(branch.seed, len(branch.tokens))
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
        """One line per message, after one line per tool; a message's calls follow it."""
        lines = [f"tool: {tool['function']['name']}\n" for tool in tools or ()]
        for message in messages:
            lines.append(f"{message['role']}: {message['content']}\n")
            for call in message.get("tool_calls", ()):
                lines.append(f"call: {json.dumps(call['function'])}\n")
        text = "".join(lines)
        return list(encode(text[:-1] if open_reply else text))

    def encode(self, text: str) -> list[int]:
        """Encode the text alone."""
        return list(encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode the text alone."""
        return self.encode(text)

    def encode_step(self, words: str, delimiter: str) -> list[int]:
        """Encode the words without the delimiter."""
        return self.encode(words)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters."""
        return decode(tokens)

    def piece(self, token: int) -> bytes:
        """Return the character's bytes."""
        return decode([token]).encode()

    def spelling(self, token: int) -> bytes:
        """Return the character's bytes."""
        return self.piece(token)

    def another(self) -> PlainText:
        """Return itself, which any number of users may share."""
        return self


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> Settings:
    """The defaults; a test changes fields by an indirect parameter."""
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
    """Return a client of the app, without sockets."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=BASE, timeout=60)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client without sockets."""
    async with client_over(app) as client:
        yield client


async def refusal(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], status: int = 400
) -> dict[str, Any]:
    """Post a body that is refused, and return the error in OpenAI's shape."""
    headers = {"content-type": "application/json"}
    answer = await http.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.fixture
def openai(http: httpx2.AsyncClient) -> AsyncOpenAI:
    """The real client of OpenAI's package, which retries nothing here."""
    return AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any", http_client=http, max_retries=0)


async def chat(openai: AsyncOpenAI, words: str = "What is it?", **fields: Any) -> ChatCompletion:
    """Ask a question and return the reply; ``fields`` are further fields of the request."""
    model, messages = fields.pop("model", "sprig"), fields.pop("messages", question(words))
    create = openai.chat.completions.create
    return await create(model=model, messages=messages, extra_body=fields)


async def chunks(openai: AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    """Ask the question as a stream and return all chunks; ``fields`` are further fields."""
    create = openai.chat.completions.create
    stream = await create(model="sprig", messages=question(), stream=True, extra_body=fields)
    return [chunk async for chunk in stream]


def concat(stream: Iterable[Any]) -> dict[int, str]:
    """Join the texts of a stream of chat or text completion chunks, by choice."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts


def search_of(completion: BaseModel) -> dict[str, Any]:
    """Return the ``search`` object of a response."""
    return (completion.model_extra or {})["search"]


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """Serve the app on a local socket, as the server does; yield its port."""
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
    """A raw ASGI request: a test reads its response as it comes, and may disconnect.

    Its body comes in ``pieces``, each a step of the event loop after the one before.
    """

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], *, pieces: int = 1) -> None:
        self.messages: list[dict[str, Any]] = []
        self.arrival = asyncio.Condition()
        self.disconnect = asyncio.Event()
        content = json.dumps(body).encode()
        cuts = [len(content) * i // pieces for i in range(pieces + 1)]
        self._body = [content[a:b] for a, b in pairwise(cuts)]
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
        """The response's bytes so far."""
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def complete(self) -> bool:
        """Whether the response's body was ended properly."""
        message = self.messages[-1] if self.messages else {}
        return message.get("type") == "http.response.body" and not message.get("more_body")

    async def until(self, count: int, mark: bytes) -> None:
        """Wait until ``mark`` has arrived ``count`` times."""
        async with self.arrival:
            await self.arrival.wait_for(lambda: self.body.count(mark) >= count)

    async def _receive(self) -> dict[str, Any]:
        if len(self._body) > 1:
            await asyncio.sleep(0)
        elif not self._body:
            await self.disconnect.wait()
        if self.disconnect.is_set():
            return {"type": "http.disconnect"}
        piece = self._body.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._body)}

    async def _send(self, message: Any) -> None:
        async with self.arrival:
            self.messages.append(message)
            self.arrival.notify_all()
