"""A client that leaves takes its tree along; a stream that fails ends visibly for its client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI

from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, PlainText, question

CHAT = {"model": "sprig", "messages": question()}
SEARCH = {"search": {"policy": "rebase", "width": 4}}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | SEARCH),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | SEARCH | {"stream": True}),
    ("/v1/search", {"question": "?"} | SEARCH),
    ("/v1/search", {"question": "?"} | SEARCH | {"stream": True}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_client_that_leaves_aborts_its_tree(
    app: FastAPI, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """Plain requests and streams: the client leaves while the engine draws; nothing is held."""
    engine.gate = asyncio.Event()
    call = Call(app, path, body)
    await engine.waiting.wait()
    assert len(engine.live) == 1
    call.disconnect.set()
    await call.task
    await app.state.service.runner.close()
    assert not engine.live
    assert len(engine.aborted) == 1
    assert not call.complete
    assert not app.state.service.runner.under_way
    assert len(app.state.service.store) == 0


class SlowText(PlainText):
    """A tokenizer that works until the test lets it go on, and counts its users at once."""

    def __init__(self) -> None:
        self.users = self.peak_users = 0
        self.continuation, self.go_on = threading.Event(), threading.Event()

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Wait for ``go_on`` before encoding."""
        self.users += 1
        self.peak_users = max(self.peak_users, self.users)
        self.continuation.set()
        self.go_on.wait(60)
        self.users -= 1
        return super().encode_chat(messages)


async def test_leaving_lets_nobody_into_the_tokenizer_beside_it(engine: ScriptedEngine) -> None:
    """A thread cannot be cancelled, so the next request waits for it."""
    text = SlowText()
    app = create_app(create_service(Settings(), engine, text))
    calls = [Call(app, "/v1/chat/completions", CHAT) for _ in range(3)]
    await asyncio.to_thread(text.continuation.wait)
    calls[0].disconnect.set()
    for _ in range(50):
        await asyncio.sleep(0)
    text.go_on.set()
    await asyncio.gather(*(call.task for call in calls))
    assert [call.complete for call in calls] == [False, True, True]
    assert text.peak_users == 1


async def test_one_client_leaving_leaves_the_others_alone(
    app: FastAPI, engine: ScriptedEngine
) -> None:
    """Of two searches under way, the one whose client stays is answered."""
    engine.gate = asyncio.Event()
    first = Call(app, "/v1/chat/completions", CHAT | SEARCH)
    second = Call(app, "/v1/chat/completions", CHAT | SEARCH)
    await engine.waiting.wait()
    first.disconnect.set()
    await first.task
    engine.gate.set()
    await second.task
    assert not first.complete
    assert second.complete
    assert json.loads(second.body)["search"]["width"] == 4


@pytest.mark.parametrize("path_body", [REQUESTS[2], REQUESTS[3], REQUESTS[5]])
async def test_a_failing_stream_says_why_and_is_cut(
    app: FastAPI,
    engine: ScriptedEngine,
    path_body: tuple[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The body has an error event, no [DONE], and is never ended: every client notices that. The
    log has one line, without a traceback."""
    engine.fail_at = 0
    path, body = path_body
    call = Call(app, path, body)
    await call.task
    error_line = [line for line in call.body.decode().splitlines() if line.startswith("data: ")][-1]
    assert json.loads(error_line.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert b"[DONE]" not in call.body
    assert not call.complete
    assert not engine.live
    (line,) = [record for record in caplog.records if "the stream failed" in record.message]
    assert (line.levelname, line.exc_info) == ("WARNING", None)
    assert line.message == "the stream failed: the engine is down"


async def test_shutdown_lets_go_of_everything(app: FastAPI, engine: ScriptedEngine) -> None:
    """Closing the runner cancels all work under way and waits until its trees are released."""
    engine.gate = asyncio.Event()
    calls = [Call(app, path, body) for path, body in REQUESTS]
    while len(engine.live) < len(calls):
        engine.waiting.clear()
        await engine.waiting.wait()
    await app.state.service.runner.close()
    await asyncio.gather(*(call.task for call in calls))
    assert not engine.live
