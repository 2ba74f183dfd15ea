"""An engine that draws on SGLang servers and scores in the embedded engine.

For measurements that concern the policy's servers alone: the reward model needs no server then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from loadtest.on_sglang import engine_on, forget, policy_server, started
from loadtest.searches import Engines
from runtime.engine_wrapper import EngineWrapper
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from search.counters import Counters
from search.engine import Capabilities, Engine, Hint, Trajectory


class Drawing(EngineWrapper):
    """Draws with ``drawer``, which is on ``server``, and scores with ``scorer``."""

    def __init__(self, drawer: SglangEngine, scorer: Engine, server: LaunchedServer) -> None:
        super().__init__(drawer)
        self._scorer = scorer
        self._server = server

    @property
    def capabilities(self) -> Capabilities:
        """The drawer's, with the scorer's needs."""
        needs = self._scorer.capabilities.score_tokens
        return replace(super().capabilities, scores=True, score_tokens=needs)

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
        super().hint(tree, hint)
        self._scorer.hint(tree, hint)

    async def release(self, tree: str) -> Counters:
        """What the drawing has cost."""
        await self._scorer.release(tree)
        return await super().release(tree)

    async def abort(self, tree: str) -> None:
        """Both."""
        await self._scorer.abort(tree)
        await super().abort(tree)

    async def forget(self) -> None:
        """Empty the server's cache."""
        await forget([self._server])


@asynccontextmanager
async def drawing_in(python: Path, kv_policy: str, kv_tokens: int) -> AsyncIterator[Drawing]:
    """An engine on a server of its own, with a pool of ``kv_tokens``."""
    server = policy_server(python, kv_policy, kv_tokens)
    async with (
        started([server]),
        engine_on([server], []) as drawer,
        Engines(threads=1) as scorer,
    ):
        yield Drawing(drawer, scorer, server)
