"""Shares of a GPU's memory for SGLang servers, computed from their models' sizes and the load, for
``hedgerow plan``, ``hedgerow check`` and launched servers alike."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from kvpolicy.roofline import DevicePeaks, KvSplit, ModelCosts, SplitLoad, roofline
from runtime.checkpoint import config_of
from runtime.embedded.model.config import ModelConfig, UnsupportedModel, footprint, weight_bytes
from server.gpus import Gpu
from server.settings import Settings, SettingsError, variable

log = logging.getLogger("hedgerow")

PASSES_SHARE = 0.12
"""The share of a GPU's memory that forward passes and CUDA graphs take beside weights and KV."""
DEFAULT_SHARES = (0.6, 0.75)
"""For unknown model sizes, and on a CPU, where ``kv_tokens`` bounds a server's memory."""
NUMBER_BYTES = 2
_NUMBERS = {
    ("--tp-size", "--tensor-parallel-size"): 1,
    ("--pp-size", "--pipeline-parallel-size"): 1,
    ("--dp-size", "--data-parallel-size"): 1,
    ("--base-gpu-id",): 0,
    ("--nnodes",): 1,
}
"""SGLang's options that decide which GPUs a server uses, with their defaults."""
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Spread:
    """The GPUs that a server's arguments spread a model over: ``tensor`` x ``pipeline`` parts,
    ``copies`` of each, from GPU number ``first`` on."""

    tensor: int = 1
    pipeline: int = 1
    copies: int = 1
    first: int = 0

    @classmethod
    def of(cls, args: str) -> Spread | None:
        """Parse SGLang's options; None for a model spread over several machines, or for an invalid
        number, which SGLang reports itself."""
        try:
            flags, _ = _parser().parse_known_args(shlex.split(args))
        except ValueError:
            return None
        if flags.nnodes > 1 or min(flags.tp_size, flags.pp_size, flags.dp_size) < 1:
            return None
        copies = 1 if flags.enable_dp_attention else flags.dp_size
        return cls(flags.tp_size, flags.pp_size, copies, flags.base_gpu_id)

    @property
    def parts(self) -> int:
        """The number of parts of one copy of the model, each on a GPU of its own."""
        return self.tensor * self.pipeline

    def meets(self, other: Spread) -> bool:
        """Whether the two share a GPU."""
        ends = [spread.first + spread.parts * spread.copies for spread in (self, other)]
        return max(self.first, other.first) < min(ends)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """Raise."""
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    """A parser of SGLang's options that decide which GPUs a server uses, abbreviated ones too."""
    parser = _Parser(add_help=False)
    for names, default in _NUMBERS.items():
        parser.add_argument(*names, type=int, default=default)
    parser.add_argument("--enable-dp-attention", action="store_true")
    return parser


@dataclass(frozen=True, slots=True)
class Placed:
    """One GPU's part of a model in bfloat16: the costs of a forward pass on that GPU, and the bytes
    of weights that it holds, including the embedding, which a pass does not read."""

    costs: ModelCosts
    weights: float
    copies: int = 1

    @classmethod
    def of(cls, config: ModelConfig, spread: Spread | None = None) -> Placed:
        """Divide a model evenly over its GPUs; a GPU holds at least one KV head."""
        spread = spread or Spread()
        sizes, parts = footprint(config, NUMBER_BYTES), spread.parts
        heads = max(1, config.kv_heads // spread.tensor) / config.kv_heads
        costs = ModelCosts(
            token_flops=sizes.token_flops / parts,
            pair_flops=sizes.pair_flops / parts,
            weight_bytes=sizes.weight_bytes / parts,
            kv_bytes=math.ceil(sizes.kv_bytes * heads / spread.pipeline),
        )
        return cls(costs, weight_bytes(config, NUMBER_BYTES) / parts, spread.copies)


@dataclass(frozen=True, slots=True)
class GpuShares:
    """How two servers share a GPU. ``budget``: bytes of KV in all; ``fractions``: each server's
    ``--mem-fraction-static``, of the memory free when it starts, the policy's server first."""

    budget: int
    split: KvSplit
    fractions: tuple[float, float]


def share_gpu(
    policy: Placed,
    reward: Placed,
    device: DevicePeaks,
    memory: float,
    load: SplitLoad,
    beside: float = 0.0,
) -> GpuShares:
    """Share ``memory`` bytes by the roofline. ``beside``: bytes of weights that the policy's server
    holds outside its share, such as a draft model's.

    Raises TooLittleMemory where not even one sequence of each fits.
    """
    sequences = math.ceil(load.sequences / min(policy.copies, reward.copies))
    weights = policy.weights + reward.weights + beside
    budget = int((1 - PASSES_SHARE) * memory - weights)
    load = replace(load, sequences=sequences)
    split = roofline(policy.costs, reward.costs, device, load, budget, keeps=True)
    first = policy.weights + split.generator_bytes
    second = (reward.weights + split.verifier_bytes) / (memory - first - beside)
    return GpuShares(budget, split, (_rounded(first / memory), _rounded(min(0.99, second))))


def _rounded(share: float) -> float:
    """Round down to 1e-4: memory above the share is needed by forward passes."""
    return int(1e4 * share) / 1e4


@dataclass(frozen=True, slots=True)
class Room:
    """For each server, the policy's first: its share, and the tokens of KV that fit into it."""

    fractions: tuple[float, ...]
    kv_tokens: tuple[int, ...]


def room_on(gpu: Gpu, settings: Settings, reward: Path | None) -> Room | None:
    """The memory of ``gpu`` that the servers launched by ``settings`` get; ``reward``: the reward
    model, None if none is launched. Returns None if sizes or GPUs are unknown.

    Raises ValueError with the sizes and the remedies if weights and KV do not fit.
    """
    folders = [settings.policy_model, *([reward] if reward else [])]
    configs = [_sizes(folder) for folder in folders]
    spreads = [Spread.of(args) for args in (settings.policy_args, settings.reward_args)]
    models = [
        Placed.of(config, spread)
        for config, spread in zip(configs, spreads, strict=False)
        if config is not None and spread is not None
    ]
    if len(models) < len(folders):
        return None
    if len(models) == 2 and spreads[0] and spreads[1] and spreads[0].meets(spreads[1]):
        return _together(gpu, models, SplitLoad(*settings.kv_load))
    tokens = [int(_kv_room(gpu, [model]) / model.costs.kv_bytes) * model.copies for model in models]
    return Room((1 - PASSES_SHARE,) * len(models), tuple(tokens))


def _together(gpu: Gpu, models: Sequence[Placed], load: SplitLoad) -> Room:
    policy, reward = models
    _kv_room(gpu, models)
    try:
        shared = share_gpu(policy, reward, gpu.peaks(), gpu.memory * GIGA, load)
    except ValueError as error:
        raise ValueError(f"{_too_large(gpu, models)}; {error}") from None
    tokens = (
        shared.split.generator_bytes // policy.costs.kv_bytes * policy.copies,
        shared.split.verifier_bytes // reward.costs.kv_bytes * reward.copies,
    )
    return Room(shared.fractions, tokens)


def _kv_room(gpu: Gpu, models: Sequence[Placed]) -> float:
    """The bytes that remain for KV beside the weights. Raises ValueError if there are none."""
    remaining = (1 - PASSES_SHARE) * gpu.memory * GIGA - sum(model.weights for model in models)
    if remaining <= 0:
        raise ValueError(_too_large(gpu, models))
    return remaining


def _too_large(gpu: Gpu, models: Sequence[Placed]) -> str:
    weights, usable = sum(model.weights for model in models), (1 - PASSES_SHARE) * gpu.memory
    return (
        f"{weights / GIGA:.1f} GB of weights in bfloat16, {usable:.1f} of {gpu.name}'s "
        f"{gpu.memory:.3g} GB hold weights and KV; take a larger GPU, spread a model over several "
        "(--policy-args '--tp-size 2', --reward-args '--tp-size 2 --base-gpu-id 2'), or give the "
        "reward model a second one (--reward-args '--base-gpu-id 1')"
    )


def launch_shares(
    settings: Settings, device: str, reward: Path | None, gpu: Gpu | None
) -> tuple[float, float]:
    """The ``--mem-fraction-static`` of both servers launched on ``gpu``: the setting, or else by
    ``room_on``.

    Raises SettingsError if the models do not fit.
    """
    if settings.launch_memory is not None:
        return settings.launch_memory
    if device == "cpu" or gpu is None:
        return DEFAULT_SHARES
    try:
        room = room_on(gpu, settings, reward)
    except ValueError as error:
        raise SettingsError(f"{variable('launch_memory')} is not set: {error}") from None
    if room is None:
        log.info(
            "shares of the GPU's memory: %s, %s, for want of sizes (--launch-memory)",
            *DEFAULT_SHARES,
        )
        return DEFAULT_SHARES
    shares = (room.fractions * 2)[:2]
    log.info("shares of the GPU's memory: %s, %s (--launch-memory)", *shares)
    return shares[0], shares[1]


def _sizes(checkpoint: Path) -> ModelConfig | None:
    """The model's sizes; None for an unknown model class or a missing configuration."""
    if not config_of(checkpoint):
        return None
    try:
        return ModelConfig.sizes_of(checkpoint)
    except UnsupportedModel:
        return None
