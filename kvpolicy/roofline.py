"""Share KV bytes between a generator and a verifier: the roofline split.

A verifier prefills, so it is bound by arithmetic even in small batches; a generator decodes and is
bound by memory traffic, so it needs the larger batch. With N sequences of S tokens, L of them new,
batches Bp and Bd cost

    ceil(N / Bp) * t_prefill(Bp, S)  +  ceil(N / Bd) * L * t_decode(Bd, S + L / 2)

seconds, where t = max(FLOPs / peak, bytes / bandwidth), subject to
Bp * S * k_ver + Bd * (S + L) * k_gen <= M, k being KV bytes a token (FlashTTS, section 4.3.1).

In the paper both models compute every sequence anew. An engine that *keeps* KV from round to round
computes again only what did not fit: of the verifier's N sequences the share Bp / N has all but its
L new tokens cached, and all but the first of the generator's batches are prefilled before they
decode. Such an engine admits a sequence whenever another ends, so N / B need not be whole. Where
common prefixes are stored once, each sequence takes only its *own* tokens. When both models have
room for all sequences, the remaining bytes are shared in proportion to the needed ones. [our
extensions: by the paper's formula a verifier bound by arithmetic never gets room for a second
sequence, however much remains, and a generator gets room for every copy of a prompt]

With host memory beside the device, the KV of the idle model can move there: each model then has all
of M to itself, and 2 * (verifier's KV + generator's KV) / host bandwidth seconds go by (section
4.3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


class TooLittleMemory(ValueError):
    """The budget does not hold one sequence of each model."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a pass of a model costs.

    ``token_flops``: FLOPs of one row without attention; ``pair_flops``: of one query with one key,
    over all layers and heads; ``weight_bytes``: read in every pass; ``kv_bytes``: a token's keys
    and values.
    """

    token_flops: float
    pair_flops: float
    weight_bytes: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """A device's peaks: ``flops`` and ``bandwidth`` (bytes) per second; ``host_bandwidth``: bytes
    per second to host memory, None if the models are in host memory anyway."""

    flops: float
    bandwidth: float
    host_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class SplitLoad:
    """``sequences`` at once, of ``length`` tokens that the verifier reads; each grows by ``new``
    tokens. ``own``: the mean tokens that a sequence stores for itself where prefixes are shared; 0:
    its whole length. ``own_grown``: the same once it has grown; 0: ``new`` more."""

    sequences: int
    length: int
    new: int
    own: int = 0
    own_grown: int = 0

    def __post_init__(self) -> None:
        for field in ("sequences", "length", "new"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; at least 1 is needed")
        if not 0 <= self.own <= self.length:
            raise ValueError(f"own: {self.own}; from 0 to the length, {self.length}, is needed")
        longest = self.length + self.new
        if not 0 <= self.own_grown <= longest:
            raise ValueError(f"own_grown: {self.own_grown}; from 0 to {longest} is needed")

    @property
    def stored(self) -> int:
        """Tokens that a sequence stores for itself before it grows."""
        return self.own or self.length

    @property
    def grown_tokens(self) -> int:
        """Tokens that a sequence stores for itself once it has grown."""
        return self.own_grown or self.stored + self.new


@dataclass(frozen=True, slots=True)
class KvSplit:
    """Both models' batches, bytes (together the whole budget), and seconds.

    ``prefill_bound``, ``decode_bound``: ``arithmetic`` or ``memory``, the one that takes longer.
    """

    verifier_batch: int
    generator_batch: int
    verifier_bytes: int
    generator_bytes: int
    prefill_seconds: float
    decode_seconds: float
    prefill_bound: str
    decode_bound: str

    @property
    def seconds(self) -> float:
        """Seconds of both stages together."""
        return self.prefill_seconds + self.decode_seconds


def roofline(
    generator: ModelCosts,
    verifier: ModelCosts,
    device: DevicePeaks,
    load: SplitLoad,
    budget: int,
    *,
    keeps: bool = False,
) -> KvSplit:
    """The split of ``budget`` bytes that takes the least time. Raises TooLittleMemory.

    Tries every verifier batch with the largest generator batch that fits; among equal times the
    first wins, which has the larger generator batch. ``keeps``: the engine keeps KV between rounds;
    a larger verifier batch is then taken if it costs no time and no generator batch.
    """
    best = None
    for batch in range(1, load.sequences + 1):
        verifier_bytes = batch * load.stored * verifier.kv_bytes
        split = _split(generator, verifier, device, load, budget, verifier_bytes, batch, keeps)
        if split is None:
            break
        if best is None or split.seconds < best.seconds or (keeps and _costs_nothing(split, best)):
            best = split
    if best is None:
        raise TooLittleMemory(_needed(generator, verifier, load, budget))
    return _with_rest_shared(best, generator, verifier, load, budget)


def even(
    generator: ModelCosts, verifier: ModelCosts, device: DevicePeaks, load: SplitLoad, budget: int
) -> KvSplit:
    """Half of ``budget`` bytes for each model, with the largest batches that fit. Raises
    TooLittleMemory."""
    half = budget // 2
    batch = min(load.sequences, half // (load.stored * verifier.kv_bytes))
    split = _split(generator, verifier, device, load, budget, half, batch) if batch else None
    if split is None:
        raise TooLittleMemory(_needed(generator, verifier, load, budget))
    return split


def offloaded(
    generator: ModelCosts,
    verifier: ModelCosts,
    device: DevicePeaks,
    load: SplitLoad,
    budget: int,
    *,
    keeps: bool = False,
) -> float | None:
    """Seconds if each model has all ``budget`` bytes while it computes and the other's KV is in
    host memory; None without host memory, or if one sequence of either model does not fit."""
    batch = min(load.sequences, budget // (load.stored * verifier.kv_bytes))
    if device.host_bandwidth is None or not batch:
        return None
    verifier_bytes = batch * load.stored * verifier.kv_bytes
    both = budget + verifier_bytes  # so that the generator, too, gets the whole budget
    split = _split(generator, verifier, device, load, both, verifier_bytes, batch, keeps)
    if split is None:
        return None
    waves = split.generator_batch * load.grown_tokens * generator.kv_bytes
    return split.seconds + 2 * (verifier_bytes + waves) / device.host_bandwidth


def prefill_seconds(
    model: ModelCosts, device: DevicePeaks, batch: int, length: int, cached: float = 0.0
) -> tuple[float, str]:
    """Seconds of one pass over ``batch`` sequences of ``length`` tokens, the first ``cached`` of
    which are not computed, and what bounds it."""
    pairs = (length - cached) * (length + cached + 1) / 2
    flops = batch * ((length - cached) * model.token_flops + pairs * model.pair_flops)
    return _slower(flops, model.weight_bytes + batch * length * model.kv_bytes, device)


def decode_seconds(
    model: ModelCosts, device: DevicePeaks, batch: int, context: float
) -> tuple[float, str]:
    """Seconds to decode one token after ``context`` in each of ``batch`` sequences; their bound."""
    flops = batch * (model.token_flops + context * model.pair_flops)
    return _slower(flops, model.weight_bytes + batch * context * model.kv_bytes, device)


def _split(
    generator: ModelCosts,
    verifier: ModelCosts,
    device: DevicePeaks,
    load: SplitLoad,
    budget: int,
    verifier_bytes: int,
    batch: int,
    keeps: bool = False,
) -> KvSplit | None:
    """The split with ``verifier_bytes``; None if the rest holds no sequence of the generator."""
    rest, n = budget - verifier_bytes, load.sequences
    generator_batch = min(n, rest // (load.grown_tokens * generator.kv_bytes))
    if generator_batch < 1:
        return None
    shared_tokens = load.length - load.stored
    cached = shared_tokens + (batch / n * max(0, load.stored - load.new) if keeps else 0.0)
    prefill, prefill_bound = prefill_seconds(verifier, device, batch, load.length, cached)
    context = load.length + load.new / 2
    decode, decode_bound = decode_seconds(generator, device, generator_batch, context)
    passes, waves = n / batch, n / generator_batch
    if not keeps:
        passes, waves = math.ceil(passes), math.ceil(waves)
    again, _ = prefill_seconds(generator, device, generator_batch, load.length, shared_tokens)
    return KvSplit(
        verifier_batch=batch,
        generator_batch=generator_batch,
        verifier_bytes=verifier_bytes,
        generator_bytes=rest,
        prefill_seconds=passes * prefill,
        decode_seconds=waves * load.new * decode + ((waves - 1) * again if keeps else 0.0),
        prefill_bound=prefill_bound,
        decode_bound=decode_bound,
    )


def _costs_nothing(candidate: KvSplit, best: KvSplit) -> bool:
    """Whether ``candidate``, of a larger verifier batch, has the same time and generator batch."""
    same = math.isclose(candidate.seconds, best.seconds, rel_tol=1e-9)
    return same and candidate.generator_batch == best.generator_batch


def _with_rest_shared(
    split: KvSplit, generator: ModelCosts, verifier: ModelCosts, load: SplitLoad, budget: int
) -> KvSplit:
    """If both models have room for every sequence, share the whole budget in proportion to what
    each needs; else the split as it is."""
    if min(split.verifier_batch, split.generator_batch) < load.sequences:
        return split
    verifying = load.stored * verifier.kv_bytes
    generating = load.grown_tokens * generator.kv_bytes
    verifier_bytes = budget * verifying // (verifying + generating)
    return replace(split, verifier_bytes=verifier_bytes, generator_bytes=budget - verifier_bytes)


def _slower(flops: float, traffic: float, device: DevicePeaks) -> tuple[float, str]:
    computing, moving = flops / device.flops, traffic / device.bandwidth
    return (computing, "arithmetic") if computing >= moving else (moving, "memory")


def _needed(generator: ModelCosts, verifier: ModelCosts, load: SplitLoad, budget: int) -> str:
    verifying = load.stored * verifier.kv_bytes
    generating = load.grown_tokens * generator.kv_bytes
    needed = f"{verifying} to verify and {generating} to generate"
    return f"budget: {budget} bytes; one sequence needs {needed}"
