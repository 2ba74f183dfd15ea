"""An engine that passes every call on to another one: the base of those that change a few."""

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
    """Passes every call on to ``engine``; calls of optional protocols only if it has them.

    ``close`` does not close that engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities."""
        return self._engine.capabilities

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Call the engine's ``expand``."""
        return await self._engine.expand(tree, branches, sampling)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Call the engine's ``score``."""
        return await self._engine.score(tree, prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Call the engine's ``embed``."""
        return await self._engine.embed(tree, prompt, trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """Call the engine's ``hint``."""
        self._engine.hint(tree, hint)

    def kv_moved(self, tree: str) -> KvMoved | None:
        """Call the engine's ``kv_moved``; None if it has none."""
        return self._engine.kv_moved(tree) if isinstance(self._engine, TellsKv) else None

    async def release(self, tree: str) -> Counters:
        """Call the engine's ``release``."""
        return await self._engine.release(tree)

    async def abort(self, tree: str) -> Counters:
        """Call the engine's ``abort``."""
        return await self._engine.abort(tree)

    async def usage(self) -> Usage:
        """Call the engine's ``usage``."""
        return await self._engine.usage()

    async def health(self) -> None:
        """Call the engine's ``health``."""
        await self._engine.health()

    async def close(self) -> None:
        """Do nothing: the engine stays open."""
