"""Routers before SGLang servers: the routing header of a tree, and whether they heed it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow_sglang.plugin import sign_seed
from hedgerow_sglang.seeded_sampling import _seed_of
from loadtest.hostile.sglang_stub import MortalStub, Stub
from models.bundled import SPRIG_FOLDER
from runtime.servers.routing import Routing, unsigned
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.controller import search
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec

POLICY = SPRIG_FOLDER / "policy"
PATHS = {"/get_server_info": "/server_info", "/health": "/health"} | {
    path: path for path in ("/generate", "/health_generate", "/get_model_info")
}
"""Paths that SMG 1.13 forwards, and the path at the worker; any other path gets 404."""


def test_headers_follow_from_the_tree_alone() -> None:
    """Each tree has a key that does not reveal its name; without a router there is no header."""
    smg = Routing("smg")
    (name, key), *rest = smg.headers("acme/t1").items()
    assert (name, rest) == ("X-SMG-Routing-Key", [])
    assert smg.headers("acme/t2")[name] != key
    assert "acme" not in key
    assert Routing("header:X-Session").headers("acme/t1") == {"X-Session": key}
    assert Routing().headers("acme/t1") == {}
    with pytest.raises(ValueError, match="routing: 'dynamo'; none, smg or header:NAME"):
        Routing("dynamo")


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_seed_is_the_same_without_its_sign(seed: int) -> None:
    """The plug-in reads the same 64-bit seed from its signed and unsigned forms."""
    unsigned_params = unsigned({"sampling_params": {"sampling_seed": seed}})["sampling_params"]
    assert unsigned_params["sampling_seed"] >= 0
    params = SimpleNamespace(**unsigned_params, custom_params=None)
    assert _seed_of(SimpleNamespace(sampling_params=params)) == seed
    sign_seed(params)
    assert params.sampling_seed == seed
    sign_seed(params)
    assert params.sampling_seed == seed


def test_what_is_not_kept_together_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A low hit rate is logged once with the header's name; not for few tokens or a high rate."""
    routing = Routing("smg")
    for expected, missing in ((900, 900), (2000, 100)):
        routing.check(expected, missing)
    assert not caplog.messages
    for _ in range(2):
        routing.check(2000, 500)
    (warning,) = caplog.messages
    assert "of 2000 tokens that searches had read before 75 % were cached" in warning
    assert warning.endswith("does it heed the header X-SMG-Routing-Key?")


class CachingStub(Stub):
    """A stub that remembers what it has read and reports ``cached_tokens``."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._read: set[tuple[int, ...]] = set()

    def _generated(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = super()._generated(request)
        path = tuple(request["input_ids"])
        cached = next((n for n in range(len(path) - 1, 0, -1) if path[:n] in self._read), 0)
        reply["meta_info"]["cached_tokens"] = cached
        whole = (*path, *reply["output_ids"])
        self._read |= {whole[:n] for n in range(1, len(whole) + 1)}
        return reply


class Router:
    """A router like SMG before two stubs: it refuses lists and negative seeds."""

    def __init__(self, choose: Callable[[str], int]) -> None:
        self.keys: list[str] = []
        self._choose = choose
        self._workers: list[MortalStub] = []
        self._client = httpx.AsyncClient(trust_env=False)
        self.url = ""

    async def start(self, ends: AsyncExitStack) -> None:
        for _ in range(2):
            worker = MortalStub(CachingStub.of(Text(POLICY)))
            await worker.start()
            ends.push_async_callback(worker.kill)
            self._workers.append(worker)
        server = await ends.enter_async_context(
            await asyncio.start_server(self._answer, "127.0.0.1", 0)
        )
        ends.push_async_callback(self._client.aclose)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            method, path, _ = head.decode().split()
            headers = {}
            while (line := await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            status, content = await self._routed(method, path, headers, body)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(content)))
            writer.write(content)
        writer.close()

    async def _routed(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        if path not in PATHS:
            return 404, b"{}"
        key = headers.get("x-smg-routing-key", "")
        if path == "/generate":
            request = json.loads(body)
            self.keys.append(key)
            if not isinstance(request.get("rid", ""), str):
                return 422, b'"rid: invalid type: sequence"'
            if request["sampling_params"].get("sampling_seed", 0) < 0:
                return 422, b'"sampling_seed: expected u64"'
        worker = self._workers[self._choose(key)]
        answer = await self._client.request(method, worker.url + PATHS[path], content=body)
        return answer.status_code, answer.content


def by_key(key: str) -> int:
    """Choose a worker by the routing key, like SMG's policy ``manual``."""
    return int(key or "0", 16) % 2


def in_turn() -> Callable[[str], int]:
    """Choose workers in turn whatever the key, like ``round_robin``."""
    turn = itertools.count()
    return lambda _: next(turn) % 2


@asynccontextmanager
async def routed(choose: Callable[[str], int]) -> AsyncIterator[tuple[SglangEngine, Router]]:
    async with AsyncExitStack() as ends:
        router = Router(choose)
        await router.start(ends)
        options = SglangOptions(
            policy=POLICY, policy_urls=(router.url,), reward_format="none", routing="smg"
        )
        engine = await SglangEngine.start(options)
        ends.push_async_callback(engine.close)
        yield engine, router


async def grow(engine: SglangEngine, tree: str, seed: int) -> Outcome:
    question = f"Use {seed + 1} 9 10 13 to make 24."
    return await search(
        Problem(tuple(Text(POLICY).encode(question)), question),
        SearchSpec(policy="rebase", width=8, seed=seed),
        engine,
        tree_id=tree,
        answer_of=lambda text: text,
        clock=time.monotonic,
    )


@pytest.mark.slow
@pytest.mark.promise(
    "Every request of a tree has the routing key that follows from its id; a warning names the "
    "header that a router ignores."
)
@pytest.mark.timeout(120)
async def test_a_router_that_heeds_the_header_keeps_trees_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests of a tree share a key, so their prefixes are cached; ignoring it is warned about."""
    async with routed(by_key) as (engine, router):
        outcomes = [await grow(engine, f"t{n}", n) for n in range(4)]
        keys = Counter(router.keys) - Counter([""])
        assert set(keys) == {Routing("smg").headers(f"t{n}")["X-SMG-Routing-Key"] for n in range(4)}
        totals = (await engine.usage()).totals
        assert totals.expected_tokens > 1000
        assert totals.rehydrated_tokens == 0
        assert "does it heed" not in caplog.text
    async with routed(in_turn()) as (engine, _):
        with caplog.at_level(logging.WARNING):
            others = [await grow(engine, f"t{n}", n) for n in range(4)]
        assert caplog.text.count("does it heed the header X-SMG-Routing-Key?") == 1
    assert [outcome.digest for outcome in others] == [outcome.digest for outcome in outcomes]
