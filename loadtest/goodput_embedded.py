"""The embedded engine for `loadtest.goodput`: one search at a time, in this process.

Generator and verifier never run at once, as in the engine's own process, so the time of each is
that of the calls to it. Every run has scheduler, scorer and stores of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from kvpolicy.roofline import DevicePeaks, ModelCosts, SplitLoad
from loadtest.goodput_rows import BASELINE, PAPER, GoodputRun
from loadtest.in_process import InProcess, ModelsInProcess
from loadtest.searches import Item, Method, grow
from runtime.embedded.choices import KvPolicy, ScheduleOrder
from runtime.embedded.kv_split import SharedKv
from runtime.embedded.model.config import footprint, measured_peaks
from runtime.embedded.options import EngineOptions
from search.engine import Branch, Sampling, Step, Trajectory
from search.spec import SearchSpec

AMPLE_TOKENS, AMPLE_MORE = 256, 4096
"""KV tokens per trajectory, and in addition, that hold any of these searches whole."""
NUMBER_BYTES = 4

Way = Literal["even", "roofline"]


@dataclass(frozen=True, slots=True)
class Pools:
    """Splits bytes of KV into the pools of a generator and a verifier on one device."""

    generator: ModelCosts
    verifier: ModelCosts
    device: DevicePeaks

    def least_bytes(self, path_tokens: int) -> int:
        """Bytes that two even halves need to hold one path each."""
        return 2 * path_tokens * max(self.generator.kv_bytes, self.verifier.kv_bytes)

    def held_bytes(self, drawn_tokens: int, scored_tokens: int) -> int:
        """Bytes of KV of the generator's and the verifier's tokens."""
        return drawn_tokens * self.generator.kv_bytes + scored_tokens * self.verifier.kv_bytes

    def tokens(
        self, way: Way, spec: SearchSpec, budget: int | None, path_tokens: int
    ) -> tuple[int, int]:
        """KV tokens of the generator and the verifier for a search, with room for a path in each;
        without a budget, with room for everything."""
        if budget is None:
            ample = AMPLE_TOKENS * spec.width + AMPLE_MORE
            return ample, ample
        least = path_tokens, path_tokens
        shared = SharedKv(self.generator, self.verifier, self.device, budget, least)
        new = min(spec.max_step_tokens, path_tokens - 1)
        load = SplitLoad(spec.width, path_tokens - new, new)  # what is known before it begins
        return shared.tokens(way, load)


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine with some of FlashTTS's parts.

    ``whole_prefix``: every trajectory is scored as a text of its own, from its first token on;
    nothing of it is kept and nothing shared. ``dedup``: what branches draw alike is computed once.
    """

    name: str
    order: ScheduleOrder = "fcfs"
    split: Way = "even"
    ahead: bool = False
    whole_prefix: bool = False
    kv_policy: KvPolicy = "arborkv"
    dedup: bool = True


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(PAPER, whole_prefix=True, kv_policy="lru", dedup=False),
        Variant(BASELINE),
        Variant("P", order="prefix"),
        Variant("MP", order="prefix", split="roofline"),
        Variant("SMP", order="prefix", split="roofline", ahead=True),
    )
}
"""Each adds a part to the one before it; the first is search-and-learn over two engines."""


class ModelPair:
    """Runs searches on a pair of models. Raises ValueError where there is no reward model."""

    def __init__(
        self, policy: Path, prm: Path, batch_limit: int, threads: int, clock: Callable[[], float]
    ) -> None:
        options = EngineOptions(policy=policy, prm=prm, batch_limit=batch_limit, threads=threads)
        self._models = ModelsInProcess(options)
        self._clock = clock
        self.pools = Pools(
            footprint(self._models.policy.config, NUMBER_BYTES),
            footprint(self._models.prm.config, NUMBER_BYTES),
            measured_peaks(options.cores, clock),
        )

    async def run(
        self, variant: Variant, spec: SearchSpec, item: Item, budget: int | None, path_tokens: int
    ) -> GoodputRun:
        """Run one search with ``budget`` bytes of KV, split between the models as the variant does.

        ``path_tokens``: the longest path to be held. For a search with room for everything the
        budget is None and ``path_tokens`` 0.
        """
        pools = self.pools.tokens(variant.split, spec, budget, path_tokens)
        engine = Sided(
            self._models,
            clock=self._clock,
            whole_prefix=variant.whole_prefix,
            kv_tokens=pools[0],
            prm_kv_tokens=pools[1],
            kv_policy=variant.kv_policy,
            order=variant.order,
            speculate=variant.ahead,
            lookahead=variant.ahead,
            dedup=variant.dedup,
        )
        method = Method(variant.name, spec)
        outcome = await grow(engine, item, method, text=self._models.text, clock=self._clock)
        peaks = engine.scheduler.cache.active_peak, engine.scorer.cache.active_peak
        return GoodputRun.of(
            item,
            outcome,
            seconds=engine.seconds,
            held_bytes=self.pools.held_bytes(*peaks),
            path_tokens=self._path(engine, spec),
            kv_tokens=pools[0],
            prm_kv_tokens=pools[1],
            slots=tuple(engine.slots),
            whole_tokens=engine.whole_tokens,
            passes=engine.clocked.passes,
            full_passes=math.ceil(engine.clocked.spans / self._models.options.batch_limit),
        )

    def _path(self, engine: Sided, spec: SearchSpec) -> int:
        """Tokens of the longest path with its next step, as the verifier reads it."""
        once, each = engine.capabilities.score_tokens
        return engine.longest + once + (1 + engine.rounds) * each


class Sided(InProcess):
    """The engine of a variant. ``whole_tokens``: those the verifier read in whole prefixes."""

    def __init__(
        self,
        models: ModelsInProcess,
        *,
        clock: Callable[[], float],
        whole_prefix: bool,
        **changes: Any,
    ) -> None:
        super().__init__(models, clock=clock, **changes)
        self.slots: list[float] = []
        self.whole_tokens = 0
        self._whole_prefix = whole_prefix
        self._alone = count()
        self._places = models.options.batch_limit

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw as the engine does, and note how full its passes were."""
        passes, spans = self.clocked.passes, self.clocked.spans
        steps = await super().expand(tree, branches, sampling)
        passes, spans = self.clocked.passes - passes, self.clocked.spans - spans
        if passes:
            self.slots.append(spans / (passes * self._places))
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score as the engine does, or each trajectory in a cache namespace of its own."""
        if not self._whole_prefix:
            return await super().score(tree, prompt, question, trajectories)
        with self._timed("score"):
            return self._score_whole(tree, prompt, question, trajectories)

    def _score_whole(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        alone = [f"{next(self._alone)}/{tree}" for _ in trajectories]
        for call, (name, trajectory) in enumerate(zip(alone, trajectories, strict=True)):
            self.scorer.score(call, name, prompt, question, [trajectory])
        rewards = self.read()
        for name in alone:
            counters = self.scorer.release(name)
            self.whole_tokens += counters.prm_tokens if counters else 0
        return [rewards[call][0] for call in range(len(trajectories))]
