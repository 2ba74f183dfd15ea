"""Several searches at once in a small pool of a real SGLang server: as SGLang is, and as launched.

A cell is grown twice, by servers of its own. ``lru``: what was used longest ago goes first,
requests are let in as they come, no round is held back and steps are asked for whole. ``plugin``:
as Hedgerow launches and asks. Both draw by seed, and the embedded engine scores, so that trees are
the same up to what SGLang's arithmetic makes of a prefix that is read again. In a pool that fits
all the plug-in runs twice, the first time with no round held back.

What the best order would have read again is known of a replay alone (`loadtest.sglang_grid`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.on_sglang import Device, engine_on, policy_server, started
from loadtest.report import say
from loadtest.searches import Engines, grow_each, items_of, steps_of
from loadtest.sglang_drawing import Drawing
from loadtest.sglang_grid import TASK, spec_of
from runtime.engine_wrapper import EngineWrapper
from runtime.sglang.replica import Replica
from search.counters import Counters
from search.engine import Branch, Engine, Sampling, Step, Trajectory
from search.outcome import Outcome

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


AMPLE_TOKENS = 20_000
CELLS = (
    ("ets", 4, 330),
    ("rebase", 4, 330),
    ("ets", 2, 525),
    ("best_first", 2, 525),
    ("ets", 4, AMPLE_TOKENS),
)
"""A policy, searches at once, tokens of the pool; the first is docs/sglang-plugin.md's trace."""
QUICK = (("ets", 2, 330), ("ets", 2, AMPLE_TOKENS))
STOCK = ("--schedule-policy", "fcfs")


@dataclass(frozen=True, slots=True)
class PoolSearches:
    """What came of all searches of a cell: an outcome, or what an error said."""

    found: Sequence[Outcome | str]
    seconds: float
    most: int
    total: int

    @property
    def outcomes(self) -> list[Outcome]:
        """Of those that ended well."""
        return [one for one in self.found if isinstance(one, Outcome)]

    @property
    def again(self) -> int:
        """Tokens read again."""
        return sum(one.stats.engine.rehydrated_tokens for one in self.outcomes)

    @property
    def drawn(self) -> int:
        """Tokens of all trees."""
        return sum(one.stats.generated_tokens for one in self.outcomes)

    @property
    def held_seconds(self) -> float:
        """For which rounds waited, all searches' together."""
        return sum(one.stats.engine.held_back_seconds for one in self.outcomes)


@asynccontextmanager
async def drawing(
    python: Path, device: Device, pool: int, *, evicts: bool, gated: bool
) -> AsyncIterator[CountedRounds]:
    """An engine on a server of its own."""
    kv_policy, args = ("arborkv", ()) if evicts else ("lru", STOCK)
    server = policy_server(python, kv_policy, pool, args=args, device=device)
    async with started([server]), engine_on([server], []) as drawer, Engines(threads=1) as scorer:
        replicas = drawer._policy.replicas
        if not gated:
            for replica in replicas:
                replica.kv_tokens = 0  # a pool that is not known holds nothing back
        with CountedRounds(Drawing(drawer, scorer, server)).listening(replicas) as engine:
            yield engine


async def grown(engine: CountedRounds, policy: str, searches: int) -> PoolSearches:
    """All at once."""
    begun = time.monotonic()
    items = items_of(TASK, "dev", searches, 0)
    found = await grow_each(engine, items, spec_of(policy), searches)
    return PoolSearches(found, time.monotonic() - begun, engine.most, engine.total)


def measured(policy: str, pool: int, first: PoolSearches, ours: PoolSearches) -> dict[str, Any]:
    """A cell's row; ``first``: as SGLang is, or with no round held back where all fits."""
    pairs = list(zip(first.found, ours.found, strict=True))
    row: dict[str, Any] = {
        "policy": policy,
        "width": spec_of(policy).width,
        "searches": len(pairs),
        "pool": pool,
        "plugin_again": ours.again,
        "drawn": ours.drawn,
        "held_seconds": round(ours.held_seconds, 1),
        "requests_a_round": ours.most,
        "requests": ours.total,
        "lost": len(pairs) - len(ours.outcomes),
        "different": sum(_said(one) != _said(other) for one, other in pairs),
    }
    if pool == AMPLE_TOKENS:
        return row | {"wall_vs_free": ours.seconds / first.seconds}
    return row | {"lru_again": first.again, "wall_vs_lru": ours.seconds / first.seconds}


def _said(one: Outcome | str) -> tuple[Any, ...]:
    """A search's answer and all of its steps."""
    return (one.answer, steps_of(one)) if isinstance(one, Outcome) else ()


async def pools(
    python: Path, *, quick: bool, device: Device = "cpu"
) -> AsyncIterator[dict[str, Any]]:
    """A row a cell."""
    for policy, searches, pool in QUICK if quick else CELLS:
        found = []
        for ours in (False, True):
            evicts = ours or pool == AMPLE_TOKENS
            async with drawing(python, device, pool, evicts=evicts, gated=ours) as engine:
                found.append(await grown(engine, policy, searches))
            way = "ours" if ours else "first"
            say(
                f"{policy} x {searches} in {pool}, {way}: {found[-1].again} again, "
                f"{found[-1].seconds:.0f} s"
            )
        yield measured(policy, pool, *found)
