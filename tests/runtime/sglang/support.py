"""Real SGLang servers of the bundled models, on the CPU, two at a time, each started once."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from models.bundled import SPRIG_FOLDER
from runtime.sglang.launched_server import LaunchedServer, LaunchOptions
from server.assemble import RunningModel, running
from server.settings import load_settings

ON_SERVERS = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]
"""Marks of tests on real servers, which are slow."""
ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
KV_TOKENS = 20_000
MEMORY = 0.5
"""SGLang counts other processes' memory as its own, so this is large; KV_TOKENS bounds the KV."""
START_SECONDS = 1200.0
LAUNCH = {
    "HEDGEROW_ENGINE": "sglang",
    "HEDGEROW_LAUNCH": "true",
    "HEDGEROW_LAUNCH_PYTHON": str(PYTHON),
    "HEDGEROW_LAUNCH_DEVICE": "cpu",
    "HEDGEROW_LAUNCH_MEMORY": f"{MEMORY},{MEMORY}",
    "HEDGEROW_KV_TOKENS": str(KV_TOKENS),
    "HEDGEROW_PRM_KV_TOKENS": str(KV_TOKENS),
    "HEDGEROW_SPECULATE": "true",
    "HEDGEROW_POLICY_ARGS": "--random-seed 1",
    "HEDGEROW_REWARD_ARGS": "--random-seed 1",
}


def stock() -> LaunchOptions:
    """Options of a plain policy server. Raises ValueError without SGLang's environment."""
    return LaunchOptions(
        model=SPRIG_FOLDER / "policy",
        python=PYTHON,
        device="cpu",
        memory=MEMORY,
        kv_tokens=KV_TOKENS,
        args=("--random-seed", "1"),
    )


class SharedServers:
    """Servers by name. ``policy`` and ``reward`` are those that ``--launch`` starts, the first one
    with our plug-in; ``stock`` is a policy server without it.
    """

    def __init__(self) -> None:
        self._ends = AsyncExitStack()
        self._parts: RunningModel | None = None
        self._stock = LaunchedServer(stock())

    async def launched(self) -> RunningModel:
        """The model that ``--launch`` runs: engine and servers, started on first use."""
        if self._parts is None:
            self._parts = await self._ends.enter_async_context(running(load_settings(LAUNCH)))
        return self._parts

    async def supervised(self) -> list[LaunchedServer]:
        """The launched servers."""
        parts = await self.launched()
        return [server for server in parts.restartable if isinstance(server, LaunchedServer)]

    async def have(self, *names: str) -> list[LaunchedServer]:
        """These servers, started and ready; the others are stopped to make room."""
        policy, reward = await self.supervised()
        by_name = {"policy": policy, "reward": reward, "stock": self._stock}
        for name in set(by_name) - set(names):
            await asyncio.to_thread(by_name[name].stop)
        servers = [by_name[name] for name in names]
        for server in servers:
            if server.process is None or server.exit_status is not None:
                await asyncio.to_thread(server.stop)
                server.start()
        await asyncio.gather(*(server.ready(START_SECONDS) for server in servers))
        return servers

    async def rest(self) -> None:
        """Stop all servers to make room for a test's own; ``have`` starts them again."""
        launched = [] if self._parts is None else await self.supervised()
        await asyncio.gather(
            *(asyncio.to_thread(server.stop) for server in (*launched, self._stock))
        )

    async def close(self) -> list[str]:
        """Stop all servers; returns the URLs of launched ones that still answer."""
        await asyncio.to_thread(self._stock.stop)
        if self._parts is None:
            return []
        servers = await self.supervised()
        await self._ends.aclose()
        answering = []
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            for server in servers:
                with contextlib.suppress(httpx.ConnectError):
                    await client.get(f"{server.url}/health")
                    answering.append(server.url)
        return answering
