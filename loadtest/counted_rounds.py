"""How many requests a round of a search sends to a SGLang server, several searches at once too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import httpx

from runtime.engine_wrapper import EngineWrapper
from runtime.sglang.replica import Replica
from search.counters import Counters
from search.engine import Branch, Engine, Sampling, Step, Trajectory

WORK = ("/generate", "/classify")
"""What brings work: a look at a server's health is none of a round's requests."""

_TREE: ContextVar[str | None] = ContextVar("tree", default=None)
"""Whose requests are sent."""


class CountedRounds(EngineWrapper):
    """``most`` requests of any round to one server, ``total`` of all rounds; not a farewell."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.total = self.most = 0
        self._round: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @contextmanager
    def listening(self, servers: Sequence[Replica]) -> Iterator[CountedRounds]:
        """Count what is sent to these meanwhile."""
        hooks = [server._client.event_hooks["request"] for server in servers]
        for hook in hooks:
            hook.append(self.look)
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove(self.look)

    async def look(self, request: httpx.Request) -> None:
        """A request is sent."""
        tree = _TREE.get()
        if tree is not None and request.method == "POST" and request.url.path in WORK:
            self.total += 1
            self._round[tree][str(request.url)] += 1
            self.most = max(self.most, *self._round[tree].values())

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """A round begins."""
        self._round[tree].clear()
        with _of(tree):
            return await super().expand(tree, branches, sampling)

    async def score(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Of the round that was drawn last."""
        with _of(tree):
            return await super().score(tree, prompt, question, trajectories)

    async def release(self, tree: str) -> Counters:
        """It has no more rounds."""
        self._round.pop(tree, None)
        return await super().release(tree)


@contextmanager
def _of(tree: str) -> Iterator[None]:
    token = _TREE.set(tree)
    try:
        yield
    finally:
        _TREE.reset(token)
