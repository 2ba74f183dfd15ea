"""How a goodput cell's bytes of KV become the two models' pools of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpolicy.roofline import DevicePeaks, ModelCosts, SplitLoad
from runtime.embedded.kv_split import SharedKv
from runtime.embedded.model.config import ModelConfig, footprint, measured_peaks
from search.spec import SearchSpec

AMPLE_TOKENS, AMPLE_MORE = 256, 4096
"""KV tokens for each trajectory, and beside, that hold any of these searches whole."""
NUMBER_BYTES = 4

Way = Literal["even", "roofline"]


@dataclass(frozen=True, slots=True)
class Pools:
    """A generator and a verifier on a device."""

    generator: ModelCosts
    verifier: ModelCosts
    device: DevicePeaks

    @classmethod
    def of(
        cls, generator: ModelConfig, verifier: ModelConfig, threads: int, clock: Callable[[], float]
    ) -> Pools:
        """Of two models in float32 on this machine, whose peaks are measured."""
        models = footprint(generator, NUMBER_BYTES), footprint(verifier, NUMBER_BYTES)
        return cls(*models, measured_peaks(threads, clock))

    def least_bytes(self, path_tokens: int) -> int:
        """What even halves need to hold one path each."""
        return 2 * path_tokens * max(self.generator.kv_bytes, self.verifier.kv_bytes)

    def held_bytes(self, drawn: int, scored: int) -> int:
        """Of so many tokens of each."""
        return drawn * self.generator.kv_bytes + scored * self.verifier.kv_bytes

    def tokens(
        self, way: Way, spec: SearchSpec, budget: int | None, path_tokens: int
    ) -> tuple[int, int]:
        """Tokens of the generator's and of the verifier's KV; without a budget room for all."""
        if budget is None:
            ample = AMPLE_TOKENS * spec.width + AMPLE_MORE
            return ample, ample
        shared, load = self.shared(budget, path_tokens), self.load(spec, path_tokens)
        return shared.even(load) if way == "even" else shared.tokens(shared.plan(load))

    def shared(self, budget: int, path_tokens: int) -> SharedKv:
        """So many bytes of both, with room for a path in each."""
        least = path_tokens, path_tokens
        return SharedKv(self.generator, self.verifier, self.device, budget, least)

    @staticmethod
    def load(spec: SearchSpec, path_tokens: int) -> SplitLoad:
        """What is known of a search before it begins."""
        new = min(spec.max_step_tokens, path_tokens - 1)
        return SplitLoad(spec.width, path_tokens - new, new)
