"""Shares of a GPU's memory for the SGLang servers that are launched, by their models' sizes."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from kvpolicy.roofline import DevicePeaks, KvSplit, ModelCosts, SplitLoad, roofline
from runtime.checkpoint import config_of
from runtime.embedded.model.config import ModelConfig, UnsupportedModel, footprint, weight_bytes
from server.gpus import GPUS
from server.machine import cuda_devices
from server.settings import Settings, SettingsError, variable

log = logging.getLogger("hedgerow")

PASSES_SHARE = 0.12
"""Of a GPU's memory, what two servers' passes and graphs take beside weights and KV."""
DEFAULT_SHARES = (0.6, 0.75)
"""Where sizes are not known, and on a CPU, where ``kv_tokens`` bounds what a server takes."""
PEAKS = DevicePeaks(1e12 * GPUS["a100"].teraflops, 1e9 * GPUS["a100"].bandwidth)
"""Of them only the ratio matters here, and other GPUs' is within 2.7 of it."""
NUMBER_BYTES = 2
_APART = "--base-gpu-id"
_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size", "--pp-size", "--dp-size")


def launch_shares(settings: Settings, device: str, reward: Path | None) -> tuple[float, float]:
    """For ``--mem-fraction-static``: of what is free when the policy's server starts, and then the
    reward model's. ``reward``: the reward model, None if none is launched.

    As set, or else what ``hedgerow plan --gpu`` computes for ``kv_load`` and the first GPU's
    memory. Raises SettingsError where the weights alone do not fit.
    """
    if settings.launch_memory is not None:
        return settings.launch_memory
    if device == "cpu" or not cuda_devices():
        return DEFAULT_SHARES
    args = [*shlex.split(settings.policy_args), *shlex.split(settings.reward_args)]
    names = {arg.partition("=")[0] for arg in args}
    if reward is None or _APART in names:
        return 1 - PASSES_SHARE, 1 - PASSES_SHARE
    policy_costs, reward_costs = _costs(settings.policy_model), _costs(reward)
    if policy_costs is None or reward_costs is None or names & {*_PARALLEL}:
        log.info(
            "shares of the GPU's memory: %s, %s, for want of sizes (--launch-memory)",
            *DEFAULT_SHARES,
        )
        return DEFAULT_SHARES
    memory, load = cuda_devices()[0].memory, SplitLoad(*settings.kv_load)
    weights = policy_costs.weight_bytes + reward_costs.weight_bytes
    budget = int((1 - PASSES_SHARE) * memory - weights)
    try:
        split = roofline(policy_costs, reward_costs, PEAKS, load, budget, keeps=True)
    except ValueError as error:
        raise SettingsError(
            f"{variable('launch_memory')} is not set: {weights / 1e9:.1f} GB of weights in "
            f"bfloat16 and the KV of {load.sequences} sequences do not fit "
            f"{memory / 1e9:.0f} GB: {error}; "
            "a second GPU for the reward model is --reward-args '--base-gpu-id 1'"
        ) from None
    shares = fractions(split, policy_costs, reward_costs, memory)
    log.info("shares of the GPU's memory: %s, %s (--launch-memory)", *shares)
    return shares


def fractions(
    split: KvSplit, policy: ModelCosts, reward: ModelCosts, memory: float
) -> tuple[float, float]:
    """SGLang's ``--mem-fraction-static``: weights and KV over what is free when a server starts,
    the policy's server first. Rounded down, since what is over is needed by passes."""
    first = policy.weight_bytes + split.generator_bytes
    second = reward.weight_bytes + split.verifier_bytes
    return int(1e4 * first / memory) / 1e4, int(1e4 * min(0.99, second / (memory - first))) / 1e4


def _costs(checkpoint: Path) -> ModelCosts | None:
    """In bfloat16; None for a class whose shape is not known here, or without a configuration."""
    if not config_of(checkpoint):
        return None
    try:
        config = ModelConfig.sizes_of(checkpoint)
    except UnsupportedModel:
        return None
    whole = weight_bytes(config, NUMBER_BYTES)
    return replace(footprint(config, NUMBER_BYTES), weight_bytes=whole)
