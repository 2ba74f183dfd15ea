"""Searches over a policy and a reward stub that can be killed, frozen and made to fail."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from loadtest.hostile.sglang_stub import MortalStub, Stub
from models.bundled import SPRIG_FOLDER
from runtime.servers import liveness, served_engine
from runtime.text import Text
from search.controller import search
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from tests.closing import closing

POLICY = SPRIG_FOLDER / "policy"
QUESTION = "Use 4 9 10 13 to make 24."
PROMPT = tuple(Text(POLICY).encode(QUESTION))


@dataclass
class MortalPair:
    """An engine over one policy server and one reward server."""

    engine: Any
    policy: MortalStub
    reward: MortalStub

    def victim(self, name: str) -> MortalStub:
        """The server called ``name``: "policy" or "reward"."""
        return self.policy if name == "policy" else self.reward

    async def grow(self, tree: str, deadline: float | None = None) -> Outcome:
        """Run a search; ``deadline``: seconds from now."""
        return await search(
            Problem(PROMPT, QUESTION),
            SearchSpec(policy="rebase", width=8, seed=3),
            self.engine,
            tree_id=tree,
            answer_of=lambda text: text,
            deadline=None if deadline is None else time.monotonic() + deadline,
            clock=time.monotonic,
        )


@asynccontextmanager
async def mortal_pair(
    policy: Stub, reward: Stub, start: Callable[[str, str], Awaitable[Any]]
) -> AsyncIterator[MortalPair]:
    """Both stubs and the engine that ``start`` makes of their URLs, with short revival waits."""
    servers = MortalStub(policy), MortalStub(reward)
    for server in servers:
        await server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "REVIVAL_WAITS", (0.01,))
        patch.setattr(served_engine, "WATCH_SECONDS", 0.05)
        try:
            async with closing(await start(*(server.url for server in servers))) as engine:
                yield MortalPair(engine, *servers)
        finally:
            for server in servers:
                await server.kill()
