"""Size both models' KV stores at the start: as given, even halves, or by the roofline."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Self

from kvpolicy.roofline import DevicePeaks, ModelCosts, SplitLoad, even, roofline
from runtime.embedded.choices import KvSplitMode
from runtime.embedded.model.config import ModelConfig, footprint, measured_peaks
from runtime.embedded.options import EngineOptions
from runtime.reward_format import reward_format

NUMBER_BYTES = 4
"""Bytes of a number in a key or value: float32."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedKv:
    """The KV bytes that a policy and a reward model share, ``budget`` in all. ``least``: the tokens
    that each store holds at least."""

    policy: ModelCosts
    prm: ModelCosts
    device: DevicePeaks
    budget: int
    least: tuple[int, int]

    @classmethod
    def of(cls, options: EngineOptions, device: DevicePeaks | None = None) -> Self | None:
        """What the two models of ``options`` share; None if there is nothing to share.

        No store gets fewer tokens than the longest sequence that it could hold as given.
        ``device``: the peaks; by default this machine's are measured.
        """
        needs_model = reward_format(options.reward_format).needs_model
        if options.kv_split == "given" or options.prm is None or not needs_model:
            return None
        configs = [ModelConfig.from_checkpoint(path) for path in (options.policy, options.prm)]
        policy, prm = (footprint(config, NUMBER_BYTES) for config in configs)
        sizes = options.kv_tokens, options.prm_kv_tokens
        least = [min(config.context, size) for config, size in zip(configs, sizes, strict=True)]
        budget = sizes[0] * policy.kv_bytes + sizes[1] * prm.kv_bytes
        device = device or measured_peaks(options.cores)
        return cls(policy, prm, device, budget, (least[0], least[1]))

    def tokens(self, mode: KvSplitMode, load: SplitLoad) -> tuple[int, int]:
        """Tokens of the policy's and the reward model's store, ``least`` or more: half of the bytes
        each if ``even``, else the split that takes the least time. Raises TooLittleMemory."""
        parts = self.policy, self.prm, self.device, load, self.budget
        split = even(*parts) if mode == "even" else roofline(*parts, keeps=True)
        least, least_prm = self.least
        most_bytes = self.budget - least * self.policy.kv_bytes
        verifier = min(max(split.verifier_bytes, least_prm * self.prm.kv_bytes), most_bytes)
        return (self.budget - verifier) // self.policy.kv_bytes, verifier // self.prm.kv_bytes


def split_pools(options: EngineOptions, device: DevicePeaks | None = None) -> EngineOptions:
    """The options with the bytes of ``kv_tokens`` and ``prm_kv_tokens`` shared as ``kv_split``
    says; unchanged if there is nothing to share. ``device``: as in ``SharedKv.of``. Raises
    TooLittleMemory."""
    kv = SharedKv.of(options, device)
    if kv is None:
        return options
    kv_tokens, prm_kv_tokens = kv.tokens(options.kv_split, options.kv_load)
    log.info("KV split %s: policy %d tokens, PRM %d", options.kv_split, kv_tokens, prm_kv_tokens)
    return replace(options, kv_tokens=kv_tokens, prm_kv_tokens=prm_kv_tokens, kv_split="given")
