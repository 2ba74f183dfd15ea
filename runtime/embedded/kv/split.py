"""How both models' KV stores are sized at the start: as given, even halves, or by the roofline."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvpolicy.split import Device, even, roofline
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.footprint import footprint, measured_peaks
from runtime.embedded.options import EngineOptions
from runtime.reward_format import reward_format

NUMBER_BYTES = 4
"""Of an entry of a key: float32."""

log = logging.getLogger(__name__)


def split_pools(options: EngineOptions, device: Device | None = None) -> EngineOptions:
    """The options with ``kv_tokens`` and ``prm_kv_tokens`` that share anew the bytes of both, as
    ``kv_split`` says; as they are where nothing is to share.

    Neither pool gets fewer tokens than the longest sequence that it could hold as given.
    ``device``: its peaks; by default this machine's are measured. Raises TooLittleMemory.
    """
    needed = reward_format(options.reward_format).needs_model
    if options.kv_split == "given" or options.prm is None or not needed:
        return options
    configs = [ModelConfig.from_checkpoint(path) for path in (options.policy, options.prm)]
    policy, prm = (footprint(config, NUMBER_BYTES) for config in configs)
    budget = options.kv_tokens * policy.kv_bytes + options.prm_kv_tokens * prm.kv_bytes
    load = options.kv_load
    device = device or measured_peaks(options.cores)
    if options.kv_split == "roofline":
        found = roofline(policy, prm, device, load, budget, keeps=True)
    else:
        found = even(policy, prm, device, load, budget)
    least, least_prm = (
        min(config.context, given) * model.kv_bytes
        for config, given, model in zip(
            configs, (options.kv_tokens, options.prm_kv_tokens), (policy, prm), strict=True
        )
    )
    verifier = min(max(found.verifier_bytes, least_prm), budget - least)
    kv_tokens, prm_kv_tokens = (budget - verifier) // policy.kv_bytes, verifier // prm.kv_bytes
    log.info("KV split %s: policy %d tokens, PRM %d", options.kv_split, kv_tokens, prm_kv_tokens)
    return replace(options, kv_tokens=kv_tokens, prm_kv_tokens=prm_kv_tokens, kv_split="given")
