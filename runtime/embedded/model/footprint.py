"""What a model's passes cost in arithmetic and in bytes, and what this machine's peaks are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvpolicy.roofline import DevicePeaks, ModelCosts
from runtime.embedded.model.config import ModelConfig

SIDE = 1024
"""Of the square matrices whose product is timed."""
COPIED_BYTES = 64 << 20
REPEATS = 5


def footprint(config: ModelConfig, number_bytes: int) -> ModelCosts:
    """The model with weights and KV of ``number_bytes`` a number, its head read in every pass."""
    rows = config.flops(1, 0)
    return ModelCosts(
        token_flops=rows,
        pair_flops=config.flops(0, 1, 0),
        weight_bytes=rows / 2 * number_bytes,
        kv_bytes=2 * config.layers * config.kv_heads * config.head_dim * number_bytes,
    )


def measured_peaks(threads: int, clock: Callable[[], float] = time.perf_counter) -> DevicePeaks:
    """The fastest of a few float32 products and of a few copies, with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
        product = _fastest(lambda: torch.mm(left, right), clock)
        source = torch.zeros(COPIED_BYTES // 4)
        target = torch.empty_like(source)
        copy = _fastest(lambda: target.copy_(source), clock)
    finally:
        torch.set_num_threads(before)
    return DevicePeaks(flops=2.0 * SIDE**3 / product, bandwidth=2.0 * COPIED_BYTES / copy)


def _fastest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        start = clock()
        work()
        times.append(clock() - start)
    return max(min(times), 1e-9)
