"""Several searches at once in a small pool of a real SGLang server: as SGLang is, and as launched.

A cell is grown by pairs of servers of its own, which take turns at going first. ``lru``: what was
used longest ago is evicted first, requests are let in as they come, no round is held back and steps
are asked for whole. ``plugin``: as Hedgerow launches and asks. Both draw by seed, and the embedded
engine scores, so that trees are the same up to what SGLang's arithmetic makes of a prefix that is
read again. In a pool that fits all the plug-in runs twice, once with no round held back.

What the best order would have read again is known only from a replay (`loadtest.sglang_grid`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from loadtest.on_sglang import Device, engine_on, policy_server, started
from loadtest.report import say
from loadtest.searches import Item, Method, embedded, grow, items_of, side_by_side, steps_of
from loadtest.sglang_grid import TASK, spec_of
from runtime.engine_wrapper import EngineWrapper
from search.counters import Counters
from search.engine import (
    Branch,
    Capabilities,
    Engine,
    EngineError,
    Hint,
    Sampling,
    Step,
    Trajectory,
)
from search.outcome import Outcome

WORK = ("/generate", "/classify")
"""Paths of requests for work: a round's requests do not include health checks."""

_TREE: ContextVar[str | None] = ContextVar("tree", default=None)
"""The tree whose requests are being sent."""


class CountedRounds(EngineWrapper):
    """Counts requests: ``most`` of a round to one server, ``total`` of all rounds; not releases.

    A request counts once it is answered, which httpx logs.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.total = self.most = 0
        self._round: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @contextmanager
    def listening(self) -> Iterator[CountedRounds]:
        """Count requests within the ``with`` block."""
        log = logging.getLogger("httpx")
        level = log.level
        log.setLevel(logging.INFO)
        log.addFilter(self._count)
        try:
            yield self
        finally:
            log.removeFilter(self._count)
            log.setLevel(level)

    def _count(self, record: logging.LogRecord) -> bool:
        """Count a request of a round; the log line always passes."""
        tree = _TREE.get()
        match record.args:
            case ("POST", httpx.URL() as url, *_) if tree is not None and url.path in WORK:
                self.total += 1
                self._round[tree][str(url)] += 1
                self.most = max(self.most, *self._round[tree].values())
        return True

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw as the engine does, as the start of a new round."""
        self._round[tree].clear()
        with _of(tree):
            return await super().expand(tree, branches, sampling)

    async def score(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Score as the engine does, as a part of the last round."""
        with _of(tree):
            return await super().score(tree, prompt, question, trajectories)

    async def release(self, tree: str) -> Counters:
        """Release the tree, which has no more rounds."""
        self._round.pop(tree, None)
        return await super().release(tree)


@contextmanager
def _of(tree: str) -> Iterator[None]:
    token = _TREE.set(tree)
    try:
        yield
    finally:
        _TREE.reset(token)


class Drawing(EngineWrapper):
    """Draws with ``drawer`` and scores with ``scorer``: the reward model needs no server then."""

    def __init__(self, drawer: Engine, scorer: Engine) -> None:
        super().__init__(drawer)
        self._scorer = scorer

    @property
    def capabilities(self) -> Capabilities:
        """The drawer's, with the scorer's overhead in tokens."""
        needs = self._scorer.capabilities.score_tokens
        return replace(super().capabilities, scores=True, score_tokens=needs)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """The scorer's rewards."""
        return await self._scorer.score(tree, prompt, question, trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """Give the hint to both, so that both can free dead nodes."""
        super().hint(tree, hint)
        self._scorer.hint(tree, hint)

    async def release(self, tree: str) -> Counters:
        """Release the tree in both; what drawing it has cost."""
        await self._scorer.release(tree)
        return await super().release(tree)

    async def abort(self, tree: str) -> Counters:
        """Abort the tree in both."""
        await self._scorer.abort(tree)
        return await super().abort(tree)


AMPLE_TOKENS = 20_000
CELLS = (
    ("ets", 4, 330),
    ("rebase", 4, 330),
    ("ets", 2, 525),
    ("best_first", 2, 525),
    ("best_first", 4, 3284),
    ("ets", 4, AMPLE_TOKENS),
)
"""A policy, searches at once, tokens of the pool: what their paths need at least, or a quarter of
what they hold at full retention (the last of `best_first`)."""
QUICK = (("ets", 2, 330), ("ets", 2, AMPLE_TOKENS))
STOCK = ("--schedule-policy", "fcfs")


@dataclass(frozen=True, slots=True)
class PoolSearches:
    """How all searches of a cell ended: with an outcome, or with an error's message."""

    ends: Sequence[Outcome | str]
    seconds: float
    most: int
    total: int

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the searches that ended without an error."""
        return [end for end in self.ends if isinstance(end, Outcome)]

    @property
    def again(self) -> int:
        """Tokens read again."""
        return sum(outcome.stats.engine.rehydrated_tokens for outcome in self.outcomes)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all trees."""
        return sum(outcome.stats.generated_tokens for outcome in self.outcomes)

    @property
    def held_seconds(self) -> float:
        """Seconds for which rounds were held back, summed over all searches."""
        return sum(outcome.stats.engine.held_back_seconds for outcome in self.outcomes)


@asynccontextmanager
async def drawing(
    python: Path, device: Device, pool: int, *, evicts: bool, gated: bool
) -> AsyncIterator[CountedRounds]:
    """An engine on a server of its own."""
    kv_policy, args = ("arborkv", ()) if evicts else ("lru", STOCK)
    server = policy_server(python, kv_policy, pool, args=args, device=device)
    async with started([server]), engine_on([server], []) as drawer, embedded(threads=1) as scorer:
        if not gated:
            for replica in drawer.replicas:
                replica.kv_tokens = 0  # with a pool of unknown size no round is held back
        with CountedRounds(Drawing(drawer, scorer)).listening() as engine:
            yield engine


async def grow_cell(engine: CountedRounds, policy: str, searches: int) -> PoolSearches:
    """Grow all searches of a cell at once."""
    start = time.monotonic()

    async def grow_item(item: Item) -> Outcome | str:
        try:
            return await grow(engine, item, Method("one", spec_of(policy)))
        except EngineError as error:
            return str(error)

    ends = await side_by_side(grow_item, items_of(TASK, "dev", searches, 0), searches)
    return PoolSearches(ends, time.monotonic() - start, engine.most, engine.total)


Pair = tuple[PoolSearches, PoolSearches]
"""A cell as SGLang is, or with no round held back where all fits; and as Hedgerow launches it."""


def measured(policy: str, pool: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """A cell's row: counts of the first pair, the median wall of all, the least and the most."""
    first, ours = pairs[0]
    ends = [both for pair in pairs for both in zip(pair[0].ends, pair[1].ends, strict=True)]
    walls = [pair[1].seconds / pair[0].seconds for pair in pairs]
    wall = [statistics.median(walls), min(walls), max(walls)]
    row: dict[str, Any] = {
        "policy": policy,
        "width": spec_of(policy).width,
        "searches": len(ours.ends),
        "pairs": len(pairs),
        "pool": pool,
        "plugin_again": ours.again,
        "drawn": ours.generated_tokens,
        "held_seconds": round(ours.held_seconds, 1),
        "requests_a_round": ours.most,
        "requests": ours.total,
        "lost": sum(not isinstance(our_end, Outcome) for _, our_end in ends),
        "different": sum(_reply_of(first_end) != _reply_of(our_end) for first_end, our_end in ends),
    }
    if pool == AMPLE_TOKENS:
        return row | {"wall_vs_free": wall}
    return row | {"lru_again": first.again, "wall_vs_lru": wall}


def _reply_of(end: Outcome | str) -> tuple[Any, ...]:
    """A search's answer and all of its steps."""
    return (end.answer, steps_of(end)) if isinstance(end, Outcome) else ()


async def pools(
    python: Path, *, quick: bool, repeats: int = 1, device: Device = "cpu"
) -> AsyncIterator[dict[str, Any]]:
    """Measure the cells, each by ``repeats`` pairs; a row for each."""
    for policy, searches, pool in QUICK if quick else CELLS:
        pairs: list[Pair] = []
        for number in range(repeats):
            runs: dict[bool, PoolSearches] = {}
            for ours in (True, False) if number % 2 else (False, True):
                evicts = ours or pool == AMPLE_TOKENS
                async with drawing(python, device, pool, evicts=evicts, gated=ours) as engine:
                    runs[ours] = await grow_cell(engine, policy, searches)
                way = "ours" if ours else "first"
                say(
                    f"{policy} x {searches} in {pool}, {way}: {runs[ours].again} again, "
                    f"{runs[ours].seconds:.0f} s"
                )
            pairs.append((runs[False], runs[True]))
        yield measured(policy, pool, pairs)
