"""`loadtest.goodput --engine sglang`: FlashTTS's parts as far as SGLang has them.

A pair of models is two SGLang servers on the CPU. A variant has options of theirs: prefixes are
scored whole where the reward model's server keeps nothing (`--disable-radix-cache`), siblings are
adjacent where the policy's orders what waits by prefix (`--schedule-policy dfs-weight`), the
roofline split gives the servers other pools. Drawing ahead goes below the rest by priority, which
SGLang has for requests as they come alone: siblings are sent one after the other, and nothing drawn
ahead is scored ahead. Servers are started anew for every variant, which therefore runs all
questions before the next one; their caches are emptied between searches. Seconds are wall time, of
one search at a time, the requests on their way included. How full a pass was SGLang does not say:
`slot_utilisation` is null. The working set is what our plug-in in both servers says that a search
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

from loadtest.goodput_embedded import VARIANTS, Pools, Variant
from loadtest.goodput_rows import GoodputRun
from loadtest.on_sglang import (
    PYTHON,
    engine_on,
    forget,
    longest_path,
    policy_server,
    reward_server,
    started,
)
from loadtest.searches import Item, Method, grow
from loadtest.watched import WatchedEngine
from runtime.embedded.model.config import ModelConfig
from runtime.sglang.launched_server import BY_PRIORITY, LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from runtime.text import Text
from search.spec import SearchSpec

SCHEDULES = {"fcfs": "fcfs", "prefix": "dfs-weight"}
"""What the policy's server lets in first, by the order of a round's branches."""


class SglangBench:
    """A pair of models on servers of their own, and searches there."""

    variants: ClassVar[Mapping[str, Variant]] = VARIANTS
    settles: ClassVar[bool] = True

    def __init__(
        self, policy: Path, prm: Path, batch_limit: int, threads: int, clock: Callable[[], float]
    ) -> None:
        """``threads`` measure this machine's peaks; SGLang's are its own."""
        configs = ModelConfig.from_checkpoint(policy), ModelConfig.from_checkpoint(prm)
        self.pools = Pools.of(*configs, threads, clock)
        self._models = policy, prm
        self._text = Text(policy)
        self._args = ("--max-running-requests", str(batch_limit))
        self._clock = clock
        self._ends = AsyncExitStack()
        self._up: tuple[Variant, bool, tuple[int, int]] | None = None
        self._servers: Sequence[LaunchedServer] = ()
        self._engine: SglangEngine | None = None

    async def run(
        self, variant: Variant, spec: SearchSpec, item: Item, budget: int | None, path_tokens: int
    ) -> GoodputRun:
        """As the embedded engine's bench does."""
        pools = self.pools.tokens(variant.split, spec, budget, path_tokens)
        engine = await self._on(variant, budget is None, pools)
        await forget(self._servers)
        watched = WatchedEngine(engine, looks=budget is None, clock=self._clock)
        method = Method(variant.name, spec)
        outcome = await grow(watched, self._text, item, method, clock=self._clock)
        return GoodputRun.of(
            item,
            outcome,
            seconds=watched.seconds,
            held_bytes=self.pools.held_bytes(watched.held, watched.prm_held),
            path_tokens=longest_path(outcome, spec, engine.capabilities.score_tokens),
            pools=pools,
        )

    async def close(self) -> None:
        """End the servers."""
        self._up = None
        await self._ends.aclose()

    async def _on(self, variant: Variant, whole: bool, pools: tuple[int, int]) -> SglangEngine:
        """The engine on servers as a variant has them, started unless they run. ``whole``: with our
        plug-in in both, for a search with room for everything."""
        if self._up != (variant, whole, pools) or self._engine is None:
            await self.close()
            schedule = (
                BY_PRIORITY if variant.ahead else ("--schedule-policy", SCHEDULES[variant.order])
            )
            policy = policy_server(
                PYTHON,
                "arborkv" if whole else variant.kv_policy,
                pools[0],
                model=self._models[0],
                args=(*self._args, *schedule),
            )
            keeps = () if whole or not variant.whole_prefix else ("--disable-radix-cache",)
            reward = reward_server(
                PYTHON,
                pools[1],
                kv_policy="arborkv" if whole else "lru",
                model=self._models[1],
                args=(*self._args, *keeps),
            )
            self._servers = policy, reward
            await self._ends.enter_async_context(started(self._servers))
            on = engine_on([policy], [reward], speculate=variant.ahead)
            self._engine = await self._ends.enter_async_context(on)
            self._up = variant, whole, pools
        return self._engine
