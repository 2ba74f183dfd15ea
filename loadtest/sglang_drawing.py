"""An engine that draws on SGLang servers and scores in the embedded engine.

For measurements that concern the policy's servers alone: the reward model needs no server then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from loadtest.searches import SPRIG, Engines
from runtime.sglang.engine import SglangEngine
from runtime.sglang.launch import Server, ServerOptions
from runtime.sglang.options import SglangOptions
from search.engine import Capabilities, Engine, Hint, Trajectory, TreeCost

KV_POLICIES = {
    "lru": (),
    "priority": ("--radix-eviction-policy", "priority"),
    "arborkv": (),
}
"""What a server evicts first, and its own options for that. ``arborkv`` is our plug-in's cache."""
START_SECONDS = 1200.0
PATIENCE_SECONDS = 120.0
"""For a sign of life from a server that shares its cores."""
SERVER_MEMORY = 0.5
"""SGLang's own bound, which others' memory counts towards; pools are given in tokens."""


class Drawing:
    """Draws with ``drawer`` and scores with ``scorer``, which has other users."""

    def __init__(self, drawer: SglangEngine, scorer: Engine) -> None:
        self.drawer = drawer
        self._scorer = scorer
        self.expand = drawer.expand
        self.embed = drawer.embed
        self.usage = drawer.usage
        self.health = drawer.health
        self.close = drawer.close

    @property
    def capabilities(self) -> Capabilities:
        """The drawer's, with the scorer's needs."""
        needs = self._scorer.capabilities.score_tokens
        return replace(self.drawer.capabilities, scores=True, score_tokens=needs)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """The embedded reward model's."""
        return await self._scorer.score(tree, prompt, question, trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """Both may free what died."""
        self.drawer.hint(tree, hint)
        self._scorer.hint(tree, hint)

    async def release(self, tree: str) -> TreeCost:
        """What the drawing has cost."""
        await self._scorer.release(tree)
        return await self.drawer.release(tree)

    async def abort(self, tree: str) -> None:
        """Both."""
        await self._scorer.abort(tree)
        await self.drawer.abort(tree)


def server_of(python: Path, kv_policy: str, kv_tokens: int) -> Server:
    """A server of the bundled policy on the CPU, not started. All of them draw by seed."""
    return Server(
        ServerOptions(
            model=SPRIG.policy,
            python=python,
            device="cpu",
            memory=SERVER_MEMORY,
            kv_tokens=kv_tokens,
            seeds=True,
            evicts=kv_policy == "arborkv",
            args=KV_POLICIES[kv_policy],
        )
    )


@asynccontextmanager
async def started(servers: Sequence[Server]) -> AsyncIterator[None]:
    """The servers are ready; they end afterwards."""
    try:
        for server in servers:
            server.start()
        await asyncio.gather(*(server.ready(START_SECONDS) for server in servers))
        yield
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))


@asynccontextmanager
async def drawing_in(python: Path, kv_policy: str, kv_tokens: int) -> AsyncIterator[Drawing]:
    """An engine on a server of its own, with a pool of ``kv_tokens``."""
    server = server_of(python, kv_policy, kv_tokens)
    async with started([server]), drawing_on([server.url]) as engine:
        yield engine


@asynccontextmanager
async def drawing_on(urls: Sequence[str]) -> AsyncIterator[Drawing]:
    """The bundled policy on the servers at ``urls``, its steps scored here."""
    options = SglangOptions(
        SPRIG.policy,
        tuple(urls),
        reward_format="none",
        connect_seconds=PATIENCE_SECONDS,
        probe_seconds=PATIENCE_SECONDS,
    )
    async with Engines(threads=1) as scorer:
        engine = Drawing(await SglangEngine.start(options), scorer)
        try:
            yield engine
        finally:
            await engine.close()
