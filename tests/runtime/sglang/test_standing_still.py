"""A server that is reached and never answers: deadlines hold, it is noticed, nothing stays."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime.servers import served_engine
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Replica
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from search.controller import search
from search.engine import EngineDown
from search.problem import Problem
from search.spec import SearchSpec, StopReason
from server.api_errors import ApiError
from server.plain_completion import PlainCompletion, complete
from server.settings import Settings

INFO = {
    "internal_states": [{"effective_max_running_requests_per_dp": 8}],
    "max_total_num_tokens": 4096,
    "context_length": 2048,
    "disable_cuda_graph": True,
}


class Stub:
    """Says what it is, is healthy and draws a token until it stands still; more it never draws."""

    def __init__(self) -> None:
        self.still = False
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        while head := await reader.readline():
            path = head.split()[1].decode()
            size = 0
            while (line := await reader.readline()).strip():
                name, _, value = line.decode().lower().partition(":")
                size = int(value) if name == "content-length" else size
            asked = await reader.readexactly(size)
            self.asked.append(path)
            if self.still or (path == "/generate" and b'"max_new_tokens":1}' not in asked):
                await reader.read()
                break
            said = json.dumps(INFO).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
        writer.close()


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[tuple[SglangEngine, Stub]]:
    """An engine over a stub."""
    stub = Stub()
    async with await asyncio.start_server(stub.answer, "127.0.0.1", 0) as listening:
        stub.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        options = SglangOptions(
            policy=str(Settings().policy_model),
            policy_urls=(stub.url,),
            reward_format="none",
            **more,
        )
        engine = await SglangEngine.start(options)
        try:
            yield engine, stub
        finally:
            await engine.close()


async def test_a_deadline_holds_and_the_tree_is_let_go_of_afterwards() -> None:
    """The reply does not wait for a server that says nothing, neither to a step nor to its abort;
    what is left of the tree is seen to without anybody waiting."""
    spec = SearchSpec(policy="self_consistency", width=2, vote="majority", seed=1)
    async with served(probe_seconds=0.3) as (engine, stub):
        stub.still = True
        async with asyncio.timeout(30):
            begun = time.monotonic()
            outcome = await search(
                Problem((1, 2, 3), "?", "\n\n"),
                spec,
                engine,
                tree_id="oak",
                answer_of=lambda text: text,
                deadline=begun + 0.2,
                clock=time.monotonic,
            )
            assert outcome.stop_reason is StopReason.DEADLINE
            assert not outcome.stats.cost_known
            wanted = PlainCompletion((1, 2, 3), limit=8, piece=8, seed=1, seconds=0.1)
            with pytest.raises(ApiError, match="before any of the reply"):
                await complete(wanted, engine, "elm", lambda _: None)
            while engine._ending:
                await asyncio.sleep(0.01)
        assert "/abort_request" in stub.asked
        assert not engine._searches


async def test_who_stands_still_is_noticed_and_who_is_busy_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody asks for its health: a look is left unanswered until the time is over."""
    monkeypatch.setattr(served_engine, "WATCH_SECONDS", 0.01)
    async with served(stall_seconds=1.5, probe_seconds=0.1) as (engine, stub):
        (replica,) = engine._policy.replicas
        stub.still = True
        while not replica.silent_seconds():
            await asyncio.sleep(0.01)
        await engine.health()
        stub.still = False
        while replica.silent_seconds():
            await asyncio.sleep(0.01)
        assert replica.up
        stub.still = True
        async with asyncio.timeout(30):
            while replica.up:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDown, match="no policy server answers"):
            await engine.health()
        stub.still = False
        async with asyncio.timeout(30):
            while not replica.up:
                await asyncio.sleep(0.01)
        await engine.health()


async def test_nothing_asked_is_no_silence() -> None:
    """Of a server that nobody has asked anything nothing is awaited."""
    replica = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=0.0))
    assert replica.silent_seconds() == 0
    await replica.close()
