"""An engine looked at from outside: what it holds after a round, and how long its calls take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from runtime.engine_wrapper import EngineWrapper
from search.engine import Branch, Engine, Sampling, Step, Trajectory


class WatchedEngine(EngineWrapper):
    """An engine whose calls are timed and whose KV is looked at after each: SGLang notes no peak.

    ``seconds`` by ``clock``, spent in ``expand`` and ``score``, looking left out. ``held`` and
    ``cached``: the most tokens that searches held of the policy's KV, and that were there at all;
    ``prm_held``: of the reward model's. All as ``Engine.usage`` has them; 0 unless it ``looks``.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        looks: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(engine)
        self.seconds = {"expand": 0.0, "score": 0.0}
        self.held = self.cached = self.prm_held = 0
        self._looks = looks
        self._clock = clock

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """As the engine does."""
        with self._timed("expand"):
            steps = await super().expand(tree, branches, sampling)
        await self._look()
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """As the engine does."""
        with self._timed("score"):
            rewards = await super().score(tree, prompt, question, trajectories)
        await self._look()
        return rewards

    async def _look(self) -> None:
        if not self._looks:
            return
        usage = await self.usage()
        self.held = max(self.held, usage.kv_tokens_active)
        self.cached = max(self.cached, usage.kv_tokens_active + usage.kv_tokens_cached)
        self.prm_held = max(self.prm_held, usage.prm_kv_tokens_active)

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        start = self._clock()
        yield
        self.seconds[call] += self._clock() - start
