"""SGLang servers on this machine, most on its CPU, for the length of a benchmark; engines on them.

Every benchmark starts its servers here, so that they end with it: also by SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from loadtest.options import PYTHON
from loadtest.searches import SPRIG
from loadtest.served import process_seconds
from runtime.sglang.launched_server import LaunchedServer, LaunchOptions
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions

T = TypeVar("T")
Device = Literal["cuda", "cpu"]

START_SECONDS = 1200.0
PATIENCE_SECONDS = 120.0
"""Seconds to wait for a sign of life from a server that shares its cores."""
MEMORY = 0.5
"""SGLang's bound on memory, other processes' included; pools are given in tokens."""


def policy_server(
    python: Path,
    kv_policy: str,
    kv_tokens: int,
    *,
    model: str | Path = SPRIG.policy,
    args: Sequence[str] = (),
    device: Device = "cpu",
    seeds: bool = True,
) -> LaunchedServer:
    """A policy's server, not started. ``kv_policy``: SGLang's own ``lru``, or ``arborkv``, our
    plug-in's cache. ``seeds``: whether it draws by seed."""
    return LaunchedServer(
        LaunchOptions(
            model=model,
            python=python,
            device=device,
            memory=MEMORY,
            kv_tokens=kv_tokens,
            seeds=seeds,
            kv_policy=kv_policy,
            args=tuple(args),
        )
    )


def reward_server(
    python: Path,
    kv_tokens: int,
    *,
    model: str | Path | None = SPRIG.prm,
    args: Sequence[str] = (),
    device: Device = "cpu",
) -> LaunchedServer:
    """A reward model's server, not started; it evicts by age, as a launched one does."""
    assert model is not None, "the bundled models have a reward model"
    return policy_server(
        python, "lru", kv_tokens, model=model, args=args, device=device, seeds=False
    )


@asynccontextmanager
async def started(servers: Sequence[LaunchedServer]) -> AsyncIterator[None]:
    """Start the servers and wait until they are ready; stop them at the end."""
    try:
        for server in servers:
            server.start()
        await asyncio.gather(*(server.ready(START_SECONDS) for server in servers))
        yield
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))


@asynccontextmanager
async def engine_on(
    policies: Sequence[LaunchedServer], rewards: Sequence[LaunchedServer], **changes: Any
) -> AsyncIterator[SglangEngine]:
    """An engine on running servers. Without a reward server it gives no rewards; ``changes`` are
    SglangOptions."""
    options = SglangOptions(
        policy=policies[0].options.model,
        policy_urls=tuple(server.url for server in policies),
        prm=rewards[0].options.model if rewards else None,
        reward_urls=tuple(server.url for server in rewards),
        reward_format=SPRIG.reward_format if rewards else "none",
        connect_seconds=PATIENCE_SECONDS,
        probe_seconds=PATIENCE_SECONDS,
    )
    engine = await SglangEngine.start(replace(options, **changes))
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def sglang_engine(
    *, kv_tokens: int, prm_kv_tokens: int, threads: int
) -> AsyncIterator[SglangEngine]:
    """As ``loadtest.searches.embedded``, but on two servers of the bundled models: the policy's
    evicts by our plug-in, the reward model's by age.

    SGLang computes with as many threads as it likes; ``threads`` is the embedded engine's alone.
    """
    servers = [policy_server(PYTHON, "arborkv", kv_tokens), reward_server(PYTHON, prm_kv_tokens)]
    async with started(servers), engine_on(servers[:1], servers[1:]) as engine:
        yield engine


async def forget(servers: Sequence[LaunchedServer]) -> None:
    """Empty the servers' caches, as if they had just been started."""
    for server in servers:
        async with _client(server) as client:
            (await client.post("/flush_cache", params={"timeout": 60})).raise_for_status()


async def at_work(server: LaunchedServer) -> int:
    """Requests that a server runs or holds back."""
    async with _client(server) as client:
        loads = (await client.get("/v1/loads")).raise_for_status().json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def cpu_seconds(server: LaunchedServer) -> float:
    """Processor seconds of a server's session since its start; 0 where there is no /proc."""
    assert server.process is not None, "it runs"
    seconds = 0.0
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            if os.getsid(pid) == server.process.pid:
                seconds += process_seconds(pid)
    return seconds


def _client(server: LaunchedServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS, trust_env=False)


def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` that SIGTERM ends in good order, so that started servers end too.

    After SIGTERM or an interrupt the program exits with 128 plus the signal's number.
    """

    async def until_terminated() -> T:
        task = asyncio.current_task()
        assert task is not None, "asyncio.run makes one"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_terminated())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
