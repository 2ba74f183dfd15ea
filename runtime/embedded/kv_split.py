"""How both models' KV stores are sized at the start: as given, even halves, or by the roofline."""

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
"""Of an entry of a key: float32."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedKv:
    """The KV bytes of a policy and a reward model, ``budget`` in all. ``least``: the tokens that
    each has room for however they are shared."""

    policy: ModelCosts
    prm: ModelCosts
    device: DevicePeaks
    budget: int
    least: tuple[int, int]

    @classmethod
    def of(cls, options: EngineOptions, device: DevicePeaks | None = None) -> Self | None:
        """What ``options`` have to share, or None.

        No pool gets fewer tokens than the longest sequence that it could hold as given.
        ``device``: its peaks; by default this machine's are measured.
        """
        needed = reward_format(options.reward_format).needs_model
        if options.kv_split == "given" or options.prm is None or not needed:
            return None
        configs = [ModelConfig.from_checkpoint(path) for path in (options.policy, options.prm)]
        policy, prm = (footprint(config, NUMBER_BYTES) for config in configs)
        sizes = options.kv_tokens, options.prm_kv_tokens
        least = [min(config.context, own) for config, own in zip(configs, sizes, strict=True)]
        budget = sizes[0] * policy.kv_bytes + sizes[1] * prm.kv_bytes
        device = device or measured_peaks(options.cores)
        return cls(policy, prm, device, budget, (least[0], least[1]))

    def tokens(self, mode: KvSplitMode, load: SplitLoad) -> tuple[int, int]:
        """Tokens of the policy and of the reward model, no fewer than the least: half of the bytes
        each if ``even``, else what takes least time. Raises TooLittleMemory."""
        parts = self.policy, self.prm, self.device, load, self.budget
        split = even(*parts) if mode == "even" else roofline(*parts, keeps=True)
        least, least_prm = self.least
        most = self.budget - least * self.policy.kv_bytes
        verifier = min(max(split.verifier_bytes, least_prm * self.prm.kv_bytes), most)
        return (self.budget - verifier) // self.policy.kv_bytes, verifier // self.prm.kv_bytes


def split_pools(options: EngineOptions, device: DevicePeaks | None = None) -> EngineOptions:
    """The options with ``kv_tokens`` and ``prm_kv_tokens`` that share anew the bytes of both, as
    ``kv_split`` says; as they are where nothing is to share. ``device``: as of ``SharedKv.of``.
    Raises TooLittleMemory."""
    shared = SharedKv.of(options, device)
    if shared is None:
        return options
    kv_tokens, prm_kv_tokens = shared.tokens(options.kv_split, options.kv_load)
    log.info("KV split %s: policy %d tokens, PRM %d", options.kv_split, kv_tokens, prm_kv_tokens)
    return replace(options, kv_tokens=kv_tokens, prm_kv_tokens=prm_kv_tokens, kv_split="given")
