"""Problems a second in a KV pool of a given size, with decisions live and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loadtest.compare import Results
from loadtest.decisions import Decisions, PolicyOf, noting, replaying
from loadtest.searches import Item, Method, grow_all
from loadtest.turns import Times, in_turns
from runtime.engine_wrapper import EngineWrapper
from search.engine import Branch, Engine, Sampling, Step, Trajectory

AMPLE_TOKENS = 96
"""KV tokens for each trajectory under way that are enough to hold everything."""

LEAST_POOL = 640
"""A pool holds at least a prompt and a step of the longest kind."""

LIVE, REPLAY = "live", "replay"

Run = tuple[str, int, str]
"""A method's name, how many searches run at once, and LIVE or REPLAY."""


class EngineFactory(Protocol):
    """Makes engines that live as long as an ``async with``, each with pools of its own."""

    def __call__(
        self, *, kv_tokens: int, prm_kv_tokens: int, threads: int
    ) -> AbstractAsyncContextManager[Engine]: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in one pool, and what was decided in the live runs with the fewest searches at once.

    ``same_trees``: whether every tree was that of the untimed comparison.
    """

    pool_tokens: int
    items: int
    times: Times[Run]
    decisions: dict[str, list[Decisions]]
    same_trees: bool

    @property
    def repeats(self) -> int:
        """How often each run was timed."""
        return min(len(seconds) for seconds in self.times.seconds.values())

    def best(self, name: str) -> tuple[float, int]:
        """A method's problems a second, and with how many searches at once it reached them."""
        rates = [
            (self.items / self.times.median(run), run[1])
            for run in self.times.seconds
            if run[0] == name and run[2] == LIVE
        ]
        return max(rates, key=lambda rate: rate[0])

    def overhead(self, name: str) -> float | None:
        """Time with live decisions over time repeating them, less 1; None if trees differed."""
        if not self.same_trees:
            return None
        least = min(run[1] for run in self.times.seconds)
        return self.times.ratio((name, least, LIVE), (name, least, REPLAY)) - 1


class Looking(EngineWrapper):
    """An engine whose KV is read after every call, since SGLang records no peak between reads."""

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw as the engine does, then read its usage."""
        steps = await super().expand(tree, branches, sampling)
        await self.usage()
        return steps

    async def score(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Score as the engine does, then read its usage."""
        rewards = await super().score(tree, prompt, question, trajectories)
        await self.usage()
        return rewards


def roomy(
    engines: EngineFactory, trajectories: int, threads: int
) -> AbstractAsyncContextManager[Engine]:
    """An engine with room for all KV of this number of trajectories at once."""
    ample = AMPLE_TOKENS * trajectories + LEAST_POOL
    return engines(kv_tokens=ample, prm_kv_tokens=ample, threads=threads)


async def peak_of(
    engines: EngineFactory, method: Method, items: Sequence[Item], at_once: int, threads: int
) -> int:
    """Tokens of KV that the engine holds at most while it grows the items with room for all.

    Raises RuntimeError if there was not room for all.
    """
    async with roomy(engines, method.spec.width * at_once, threads) as engine:
        await grow_all(Looking(engine), items, method, at_once)
        usage = await engine.usage()
        if usage.totals.preemptions or usage.totals.held_evicted_tokens:
            raise RuntimeError(f"{method.name} outgrew its pool: AMPLE_TOKENS is too small")
        return usage.kv_tokens_peak


async def time_pool(
    engines: EngineFactory,
    all_results: Sequence[Results],
    items: Sequence[Item],
    *,
    pool_tokens: int,
    prm_tokens: int,
    at_once: Sequence[int],
    replay: bool,
    repeats: int,
    threads: int,
    another: Callable[[], bool],
) -> Timing:
    """Time every method in turn on an engine with this pool.

    ``all_results``: the methods with their results in the comparison, the first ``items`` with
    rounds; ``replay``: repeat those rounds too, at the fewest searches at once.
    """
    pool_tokens = max(pool_tokens, LEAST_POOL)
    watch = _Watch(items, min(at_once))
    async with engines(kv_tokens=pool_tokens, prm_kv_tokens=prm_tokens, threads=threads) as engine:
        calls = {
            (results.method.name, c, kind): partial(watch.run, engine, results, c, kind)
            for c in at_once
            for results in all_results
            for kind in ((LIVE, REPLAY) if replay and c == min(at_once) else (LIVE,))
        }
        times = await in_turns(calls, repeats, another=another)
    return Timing(pool_tokens, len(items), times, watch.decisions, watch.same_trees)


class _Watch:
    """Runs what is timed, and notes its decisions and trees."""

    def __init__(self, items: Sequence[Item], least: int) -> None:
        self.items = items
        self.least = least
        self.decisions: dict[str, list[Decisions]] = {}
        self.same_trees = True

    async def run(self, engine: Engine, results: Results, at_once: int, kind: str) -> None:
        """Grow all items by one method, with decisions live or replayed."""
        method = results.method
        by_item = dict(zip(self.items, results.results, strict=False))

        def deciding(item: Item) -> PolicyOf:
            decisions = Decisions()
            if at_once == self.least:
                self.decisions.setdefault(method.name, []).append(decisions)
            return noting(method.policy_of, decisions, time.perf_counter)

        def repeating(item: Item) -> PolicyOf:
            return replaying(method.policy_of, by_item[item].rounds)

        policy_for = repeating if kind == REPLAY else deciding
        outcomes = await grow_all(engine, self.items, method, at_once, policy_for)
        digests = [outcome.digest for outcome in outcomes]
        self.same_trees &= digests == [by_item[item].digest for item in self.items]
