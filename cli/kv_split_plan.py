"""``hedgerow plan``: plans how policy and reward model share KV bytes, with reasons."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from shlex import quote
from typing import Any

from kvpolicy.roofline import DevicePeaks, KvSplit, ModelCosts, SplitLoad, even, offloaded, roofline
from runtime.embedded.model.config import ModelConfig, footprint, measured_peaks, weight_bytes
from runtime.reward_format import reward_format
from server.gpus import Gpu
from server.launch_memory import GIGA, NUMBER_BYTES, Placed, Spread, share_gpu
from server.settings import Settings, SettingsError

FLOAT_BYTES = 4
DRAFT_TOKENS = 3
"""The tokens drafted at a time by default: SEED's k_config (1, 1, 1)."""


def make_plan(
    settings: Settings, load: SplitLoad, gpu: Gpu | None = None, host: float | None = None
) -> dict[str, Any]:
    """A report of the roofline split and the even one, with tokens, SGLang's fractions and reasons.

    ``gpu``: where SGLang runs the models, in bfloat16; None: the embedded engine runs them, in
    float32, with this machine's peaks as measured now. ``host``: GB/s to the GPU's host memory. The
    bytes to share are those of ``kv_tokens`` and ``prm_kv_tokens`` together; a GPU's memory is
    shared by ``server.launch_memory.share_gpu``, as for launched servers. With a ``draft`` setting
    SGLang drafts too: ``draft_args`` are its server's flags, and the policy's KV includes the
    draft's layers. With ``host``, ``offload`` says what KV in host memory would gain. Raises
    SettingsError without a reward model, ValueError without room or for an unreadable checkpoint.
    """
    if settings.reward_model is None or not reward_format(settings.reward_format).needs_model:
        raise SettingsError("HEDGEROW_REWARD_MODEL: none; there is nothing to share KV with")
    if gpu is None:
        device = measured_peaks(settings.threads or os.cpu_count() or 1)
        policy, prm = (
            footprint(ModelConfig.from_checkpoint(folder), FLOAT_BYTES)
            for folder in (settings.policy_model, settings.reward_model)
        )
        budget = settings.kv_tokens * policy.kv_bytes + settings.prm_kv_tokens * prm.kv_bytes
        best = roofline(policy, prm, device, load, budget, keeps=True)
        return _plan(policy, prm, device, load, budget, best)
    device, memory = gpu.peaks(host), gpu.memory * GIGA
    first, second = _placed(settings, settings.policy_model, settings.reward_model)
    draft, beside = _draft(settings), 0.0
    if draft is not None:
        beside = weight_bytes(draft, NUMBER_BYTES)
        layers = ModelConfig.sizes_of(settings.policy_model).layers
        kv_bytes = first.costs.kv_bytes * (layers + draft.layers) // layers
        first = replace(first, costs=replace(first.costs, kv_bytes=kv_bytes))  # as SGLang counts it
    shared = share_gpu(first, second, device, memory, load, beside)
    plan = _plan(first.costs, second.costs, device, load, shared.budget, shared.split)
    plan["mem_fraction_static"] = dict(
        zip(("policy", "reward_model"), shared.fractions, strict=True)
    )
    if draft is not None:
        plan["draft_args"] = draft_args(settings, shared.split.generator_batch)
    return plan


def _placed(settings: Settings, policy: Path, reward: Path) -> tuple[Placed, Placed]:
    """Both models on the GPUs of their servers' arguments. Raises ValueError if no GPU has both
    models, or if the GPUs are unknown."""
    spreads = [Spread.of(args) for args in (settings.policy_args, settings.reward_args)]
    if spreads[0] is None or spreads[1] is None or not spreads[0].meets(spreads[1]):
        raise ValueError("HEDGEROW_POLICY_ARGS and HEDGEROW_REWARD_ARGS: no GPU that both have")
    return (
        Placed.of(ModelConfig.sizes_of(policy), spreads[0]),
        Placed.of(ModelConfig.sizes_of(reward), spreads[1]),
    )


def _plan(
    policy: ModelCosts,
    prm: ModelCosts,
    device: DevicePeaks,
    load: SplitLoad,
    budget: int,
    best: KvSplit,
) -> dict[str, Any]:
    """The report on a split of ``budget`` bytes."""
    halves = even(policy, prm, device, load, budget)
    report: dict[str, Any] = {
        "load": asdict(load),
        "device": asdict(device),
        "budget_bytes": budget,
        "roofline": _split_row(best, policy, prm),
        "even": _split_row(halves, policy, prm),
        "reasons": _reasons(best, halves, load, device, budget),
    }
    if device.host_bandwidth is not None:
        report["offload"] = _offload(policy, prm, device, device.host_bandwidth)
        apart = offloaded(policy, prm, device, load, budget, keeps=True)
        report["offload"]["apart_seconds"] = apart
        report["reasons"] += _offload_reasons(report["offload"], best.seconds)
    return report


def _split_row(split: KvSplit, policy: ModelCosts, prm: ModelCosts) -> dict[str, Any]:
    return asdict(split) | {
        "seconds": split.seconds,
        "kv_tokens": split.generator_bytes // policy.kv_bytes,
        "prm_kv_tokens": split.verifier_bytes // prm.kv_bytes,
    }


def _offload(
    policy: ModelCosts, prm: ModelCosts, device: DevicePeaks, bandwidth: float
) -> dict[str, Any]:
    """For each model the microseconds to copy a token's KV from host memory and to compute it again
    in a large prefill; if copying is faster, also SGLang's flag for it."""
    times: dict[str, Any] = {}
    for name, model in {"policy": policy, "reward_model": prm}.items():
        copy_seconds, compute_seconds = model.kv_bytes / bandwidth, model.token_flops / device.flops
        times[name] = {
            "copied_us": 1e6 * copy_seconds,
            "computed_us": 1e6 * compute_seconds,
            "args": "--enable-hierarchical-cache" if copy_seconds < compute_seconds else "",
        }
    return times


def _offload_reasons(offload: dict[str, Any], seconds: float) -> list[str]:
    reasons = []
    for name in ("policy", "reward_model"):
        times = offload[name]
        reasons.append(
            f"A token that the {name.replace('_', ' ')} has dropped comes back from host memory in "
            f"{times['copied_us']:.3g} us and is computed again in {times['computed_us']:.3g} us."
        )
    apart = offload["apart_seconds"]
    if apart is not None:
        better = "faster than" if apart < seconds else "no faster than"
        reasons.append(
            f"With the KV of whichever model rests in host memory: {apart:.3g} s, {better} shared."
        )
    return reasons


def _draft(settings: Settings) -> ModelConfig | None:
    """SGLang's draft model, None if drafting is off. Raises SettingsError if none is named."""
    if settings.draft == "off":
        return None
    if settings.draft_model is None:
        raise SettingsError(
            f"HEDGEROW_DRAFT_MODEL: none; HEDGEROW_DRAFT = {settings.draft} needs one"
        )
    return ModelConfig.from_checkpoint(settings.draft_model)


def draft_args(settings: Settings, sequences: int) -> str:
    """SGLang's flags for the draft model of ``settings`` and for ``sequences`` at once, which would
    be 48 by default."""
    widths = settings.k_config or (1,) * (settings.draft_tokens or DRAFT_TOKENS)
    flags = {
        "algorithm": "STANDALONE",
        "draft-model-path": quote(str(settings.draft_model)),
        "num-steps": len(widths),
        "eagle-topk": max(widths),
        "num-draft-tokens": 1 + sum(accumulate(widths, mul)),
    }
    draft_flags = " ".join(f"--speculative-{name} {value}" for name, value in flags.items())
    return f"{draft_flags} --max-running-requests {sequences}"


def _reasons(
    best: KvSplit, halves: KvSplit, load: SplitLoad, device: DevicePeaks, budget: int
) -> list[str]:
    share = best.generator_bytes / budget
    return [
        f"Peaks: {device.flops / 1e9:.0f} GFLOP/s, {device.bandwidth / 1e9:.0f} GB/s.",
        f"Load: {load.sequences} sequences of {load.length} tokens, each to grow by {load.new}.",
        f"The reward model has room for {best.verifier_batch} of them; its time goes into "
        f"{_word(best.prefill_bound)}, so a larger batch would "
        f"{'only spare it reading again' if best.prefill_bound == 'arithmetic' else 'help it'}.",
        f"The policy decodes {best.generator_batch} at once; its time goes into "
        f"{_word(best.decode_bound)}.",
        f"So of {budget / 1e6:.0f} MB of KV the policy gets {share:.0%}: {best.seconds:.3g} s "
        f"by the roofline, against {halves.seconds:.3g} s with half for each.",
    ]


def _word(bound: str) -> str:
    return "arithmetic" if bound == "arithmetic" else "moving bytes"
