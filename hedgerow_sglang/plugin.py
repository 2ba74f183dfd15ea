"""The entry point of the group ``sglang.srt.plugins``: what our plug-in adds to SGLang.

It adds the radix cache backends of ``plugin_protocol.BACKENDS``, hooks that hand notes to them,
seeded sampling, and counts in ``/server_info``. SGLang calls ``register`` in each of its processes.
Only numbers, names and ids are read from a request: no code, and no flag that would let code in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from hedgerow_sglang.chain_seeds import learn_ends, next_seeds
from hedgerow_sglang.past_output import count_past_output
from hedgerow_sglang.plugin_protocol import BACKENDS, NAME, OUTPUT, parse_note, parse_output
from hedgerow_sglang.seeded_sampling import sample, seeded_batch
from hedgerow_sglang.step_chain import CHAIN, ENDS, parse_chain, parse_ends

OLDEST = (0, 5, 16)
NEWEST = (0, 5, 23)
_PAIRS_SINCE = (0, 5, 20)
"""From this version on the sampler also returns what it captured of the distribution."""

_SAMPLER = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_DECODE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_VERIFY = "sglang.srt.sampling.sampling_params.SamplingParams.verify"


def register() -> None:
    """Add everything to this process; on an unsupported SGLang only backends that raise why."""
    from sglang.srt.mem_cache.registry import (  # pyright: ignore[reportMissingImports]
        register_radix_cache_backend,
    )
    from sglang.srt.plugins.hook_registry import (  # pyright: ignore[reportMissingImports]
        HookRegistry,
        HookType,
    )

    for kv_policy, backend in BACKENDS.items():
        register_radix_cache_backend(backend, partial(make_cache, kv_policy))
    version = version_of(_version())
    if not supported(version):
        return
    HookRegistry.register(_VERIFY, sign_seed, HookType.BEFORE)
    HookRegistry.register(_VERIFY, reject_invalid_notes, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", deliver_note, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", report_counts, HookType.AFTER)
    HookRegistry.register(_DECODE, next_seeds, HookType.BEFORE)
    HookRegistry.register(_BATCH, seeded_batch, HookType.AFTER)
    HookRegistry.register(_BATCH, count_past_output, HookType.AFTER)
    HookRegistry.register(_SAMPLER, sampler_of(version), HookType.AROUND)


def _version() -> str:
    return metadata.version("sglang")


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version: 0.5.16.post1 is (0, 5, 16)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def supported(version: tuple[int, ...]) -> bool:
    """Whether this is a version of SGLang whose internals are known to fit the plug-in."""
    return OLDEST <= version <= NEWEST


def make_cache(kv_policy: str, context: Any) -> Any:
    """Make the radix cache of a ``--kv-policy``. Raises ValueError naming what it cannot serve."""
    backend = BACKENDS[kv_policy]
    if not supported(version_of(_version())):
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ValueError(
            f"--radix-cache-backend {backend}: SGLang {_version()}; "
            f"{oldest} to {newest} is supported"
        )
    for field, flag in (
        ("is_hybrid_swa", "a model with sliding-window attention"),
        ("is_hybrid_ssm", "a model with state-space layers"),
        ("enable_hierarchical_cache", "--enable-hierarchical-cache"),
    ):
        if getattr(context, field, False):
            raise ValueError(
                f"--radix-cache-backend {backend}: {flag}; it holds plain KV only "
                "(hedgerow --kv-policy lru starts a server without it)"
            )
    from hedgerow_sglang.caches import CACHES

    return CACHES[kv_policy](context.params)


def sign_seed(params: Any, *_: Any, **__: Any) -> None:
    """Before ``SamplingParams.verify``, which refuses seeds from 2^63 on: make these negative.
    Routers accept seeds only without a sign."""
    seed = params.sampling_seed
    if isinstance(seed, int) and 1 << 63 <= seed < 1 << 64:
        params.sampling_seed = seed - (1 << 64)


def reject_invalid_notes(_: Any, params: Any, *__: Any) -> None:
    """After ``SamplingParams.verify``: raise NoteError for an invalid note before it is queued."""
    custom = params.custom_params or {}
    for name, parse in (
        (NAME, parse_note),
        (CHAIN, parse_chain),
        (ENDS, parse_ends),
        (OUTPUT, parse_output),
    ):
        if name in custom:
            parse(custom[name])


def deliver_note(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Before ``Scheduler.handle_generate_request``: hand the request's note to the cache."""
    custom = request.sampling_params.custom_params or {}
    learn_ends(custom)
    text = custom.get(NAME)
    if text is not None and hasattr(scheduler.tree_cache, "take_note"):
        scheduler.tree_cache.queue = lambda: scheduler.waiting_queue
        scheduler.tree_cache.take_note(parse_note(text))


def report_counts(answer: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add the plug-in's counts, for ``/server_info``."""
    cache = scheduler.tree_cache
    counts = cache.state() if hasattr(cache, "take_note") else {"evicts": 0}
    chains = not scheduler.enable_overlap and scheduler.spec_algorithm.is_none()
    answer.internal_state[NAME] = counts | {"seeds": 1, "chains": int(chains), "outputs": 1}
    return answer


def sampler_of(version: tuple[int, ...]) -> Callable[..., Any]:
    """A hook around ``Sampler._sample_from_probs`` that returns what this version's does."""

    def around(
        original: Callable[..., Any],
        sampler: Any,
        probs: Any,
        info: Any,
        positions: Any,
        simple: bool,
    ) -> Any:
        captures = getattr(info, "sampling_mask_batch_indices", None) is not None
        if info.sampling_seed is None or captures:
            return original(sampler, probs, info, positions, simple)
        tokens = sample(probs, info, positions)
        return (tokens, None) if version >= _PAIRS_SINCE else tokens

    return around
