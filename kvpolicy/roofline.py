"""How to share KV bytes between a generator and a verifier: the roofline split.

A verifier prefills and is soon bound by arithmetic; a generator decodes and is bound by memory
traffic, so it wants the larger batch. With N sequences of S tokens, L of them new, batches Bp and
Bd cost

    ceil(N / Bp) * t_prefill(Bp, S)  +  ceil(N / Bd) * L * t_decode(Bd, S + L / 2)

seconds, where t = max(FLOPs / peak, bytes / bandwidth), subject to
Bp * S * k_ver + Bd * (S + L) * k_gen <= M, k being KV bytes a token (FlashTTS, section 4.3.1).

There both read every sequence anew. An engine that *keeps* KV from round to round reads again only
what it had no room for: of the verifier's N sequences the share Bp / N has all but its L new tokens
kept, and all but the first of the generator's batches are prefilled before they decode. As such an
engine lets one in as another ends, N / B batches need not be whole. Where what sequences begin
alike is stored once, each takes only the tokens of its *own*. Bytes that are left when both have
room for all are shared as the needed ones are. [our extensions: by the paper's formula a verifier
bound by arithmetic never gets room for a second sequence, however much is left, and a generator
gets room for every copy of a prompt]

With host memory beside the device, the KV of whichever model rests can go there: each then has all
of M to itself, and 2 * (verifier's KV + generator's KV) / host bandwidth seconds go by (section
4.3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


class TooLittleMemory(ValueError):
    """Not even one sequence of each model fits."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a pass of a model costs.

    ``token_flops``: of one row, attention left out; ``pair_flops``: of one query meeting one key,
    all layers and heads; ``weight_bytes``: read in every pass; ``kv_bytes``: a token's keys and
    values.
    """

    token_flops: float
    pair_flops: float
    weight_bytes: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Peaks: ``flops`` and ``bandwidth`` (bytes) a second; ``host_bandwidth``: to host memory, None
    where the models lie there anyway."""

    flops: float
    bandwidth: float
    host_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class SplitLoad:
    """``sequences`` at once, of ``length`` tokens that the verifier reads, and ``new`` tokens that
    each is to grow by. ``own``: of its length, what a sequence takes where beginnings are shared,
    on average; 0: all of it. ``own_grown``: what it takes once it has grown; 0: ``new`` more."""

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
        most = self.length + self.new
        if not 0 <= self.own_grown <= most:
            raise ValueError(f"own_grown: {self.own_grown}; from 0 to {most} is needed")

    @property
    def stored(self) -> int:
        """Tokens that a sequence takes."""
        return self.own or self.length

    @property
    def grown(self) -> int:
        """Tokens that it takes once it has grown."""
        return self.own_grown or self.stored + self.new


@dataclass(frozen=True, slots=True)
class KvSplit:
    """Batches, the bytes each model gets (together all there are), and the seconds they take.

    ``prefill_bound``, ``decode_bound``: ``arithmetic`` or ``memory``, whichever takes longer.
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
        """Of both stages."""
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
    """The split of ``budget`` bytes that takes least time; ``keeps``: by an engine that keeps KV.

    For every verifier batch the largest generator batch that fits, which only shrinks as the other
    grows: of equal times the first has the larger one. Where KV is kept, a larger verifier batch is
    taken if it costs neither time nor generator batch. Raises TooLittleMemory.
    """
    best = None
    for batch in range(1, load.sequences + 1):
        held = batch * load.stored * verifier.kv_bytes
        split = _split(generator, verifier, device, load, budget, held, batch, keeps)
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
    """Half of ``budget`` bytes for each, with the largest batches that fit. Raises
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
    """Seconds where each model has all ``budget`` bytes while it computes and the other's KV is in
    host memory; None where there is none, or no room for a sequence of each in turn."""
    batch = min(load.sequences, budget // (load.stored * verifier.kv_bytes))
    if device.host_bandwidth is None or not batch:
        return None
    held = batch * load.stored * verifier.kv_bytes
    # beside a verifier that is not there: the generator's rest is the whole budget
    split = _split(generator, verifier, device, load, budget + held, held, batch, keeps)
    if split is None:
        return None
    waves = split.generator_batch * load.grown * generator.kv_bytes
    return split.seconds + 2 * (held + waves) / device.host_bandwidth


def prefill_seconds(
    model: ModelCosts, device: DevicePeaks, batch: int, length: int, kept: float = 0.0
) -> tuple[float, str]:
    """One pass over ``batch`` sequences of ``length`` tokens, the first ``kept`` of which need no
    computing, and what bounds it."""
    pairs = (length - kept) * (length + kept + 1) / 2
    flops = batch * ((length - kept) * model.token_flops + pairs * model.pair_flops)
    return _slower(flops, model.weight_bytes + batch * length * model.kv_bytes, device)


def decode_seconds(
    model: ModelCosts, device: DevicePeaks, batch: int, held: float
) -> tuple[float, str]:
    """One token for each of ``batch`` sequences that hold ``held`` tokens on average."""
    flops = batch * (model.token_flops + held * model.pair_flops)
    return _slower(flops, model.weight_bytes + batch * held * model.kv_bytes, device)


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
    """``verifier_bytes`` for a verifier batch, the rest for the generator; None if it cannot be."""
    rest, n = budget - verifier_bytes, load.sequences
    decoding = min(n, rest // (load.grown * generator.kv_bytes))
    if decoding < 1:
        return None
    shared = load.length - load.stored
    kept = shared + (batch / n * max(0, load.stored - load.new) if keeps else 0.0)
    prefill, prefill_bound = prefill_seconds(verifier, device, batch, load.length, kept)
    decode, decode_bound = decode_seconds(generator, device, decoding, load.length + load.new / 2)
    passes, waves = n / batch, n / decoding
    if not keeps:
        passes, waves = math.ceil(passes), math.ceil(waves)
    again = (waves - 1) * prefill_seconds(generator, device, decoding, load.length, shared)[0]
    return KvSplit(
        verifier_batch=batch,
        generator_batch=decoding,
        verifier_bytes=verifier_bytes,
        generator_bytes=rest,
        prefill_seconds=passes * prefill,
        decode_seconds=waves * load.new * decode + (again if keeps else 0.0),
        prefill_bound=prefill_bound,
        decode_bound=decode_bound,
    )


def _costs_nothing(more: KvSplit, best: KvSplit) -> bool:
    """Whether ``more``, of a larger verifier batch, takes the same time and generator batch."""
    same = math.isclose(more.seconds, best.seconds, rel_tol=1e-9)
    return same and more.generator_batch == best.generator_batch


def _with_rest_shared(
    split: KvSplit, generator: ModelCosts, verifier: ModelCosts, load: SplitLoad, budget: int
) -> KvSplit:
    """The split with the bytes that neither batch needs shared as the needed ones are, if both have
    room for every sequence."""
    if min(split.verifier_batch, split.generator_batch) < load.sequences:
        return split
    verifying, generating = load.stored * verifier.kv_bytes, load.grown * generator.kv_bytes
    verifier_bytes = budget * verifying // (verifying + generating)
    return replace(split, verifier_bytes=verifier_bytes, generator_bytes=budget - verifier_bytes)


def _slower(flops: float, traffic: float, device: DevicePeaks) -> tuple[float, str]:
    computing, moving = flops / device.flops, traffic / device.bandwidth
    return (computing, "arithmetic") if computing >= moving else (moving, "memory")


def _needed(generator: ModelCosts, verifier: ModelCosts, load: SplitLoad, budget: int) -> str:
    verifying = load.stored * verifier.kv_bytes
    generating = load.grown * generator.kv_bytes
    needed = f"{verifying} to verify and {generating} to generate"
    return f"budget: {budget} bytes; one sequence needs {needed}"
