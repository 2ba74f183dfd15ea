"""An engine that calls another for everything: the base of those that change a little of it."""

from __future__ import annotations

from collections.abc import Sequence

from search.counters import Counters, Usage
from search.engine import (
    Branch,
    Capabilities,
    Engine,
    Hint,
    KvMoved,
    Sampling,
    Step,
    TellsKv,
    Trajectory,
)


class EngineWrapper:
    """Every call goes to ``engine``, those of optional protocols if it knows them.

    The engine is not this one's to close.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:
        """The engine's."""
        return self._engine.capabilities

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """As the engine does."""
        return await self._engine.expand(tree, branches, sampling)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """As the engine does."""
        return await self._engine.score(tree, prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """As the engine does."""
        return await self._engine.embed(tree, prompt, trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """As the engine does."""
        self._engine.hint(tree, hint)

    def kv_moved(self, tree: str) -> KvMoved | None:
        """As the engine does, if it does."""
        return self._engine.kv_moved(tree) if isinstance(self._engine, TellsKv) else None

    async def release(self, tree: str) -> Counters:
        """As the engine does."""
        return await self._engine.release(tree)

    async def abort(self, tree: str) -> None:
        """As the engine does."""
        await self._engine.abort(tree)

    async def usage(self) -> Usage:
        """As the engine does."""
        return await self._engine.usage()

    async def health(self) -> None:
        """As the engine does."""
        await self._engine.health()

    async def close(self) -> None:
        """Nothing."""
