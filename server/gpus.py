"""GPUs by name: peak rates from data sheets, memory sizes as reported by the driver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvpolicy.roofline import DevicePeaks
from server import machine


@dataclass(frozen=True, slots=True)
class Gpu:
    """TFLOP/s of dense bfloat16, GB/s of memory bandwidth, and GB (1e9 bytes) of memory."""

    name: str
    teraflops: float
    bandwidth: float
    memory: float

    def peaks(self, host: float | None = None) -> DevicePeaks:
        """Its peaks; ``host``: GB/s to host memory. Raises ValueError unless that is above 0."""
        if host is not None and not host > 0:
            raise ValueError(f"host bandwidth: {host}; more than 0 GB/s is needed")
        to_host = None if host is None else 1e9 * host
        return DevicePeaks(1e12 * self.teraflops, 1e9 * self.bandwidth, to_host)


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, teraflops, bandwidth, (mebibytes << 20) / 1e9)
    for name, teraflops, bandwidth, mebibytes in (
        ("b200", 2250, 8000, 183359),
        ("h200", 989, 4800, 143771),
        ("h100", 989, 3350, 81559),
        ("h100-pcie", 756, 2000, 81559),
        ("a100", 312, 2039, 81920),
        ("a100-40gb", 312, 1555, 40960),
        ("l40s", 362, 864, 46068),
        ("l4", 121, 300, 23034),
        ("a10g", 70, 600, 23028),
        ("5090", 209, 1792, 32607),
        ("4090", 165, 1008, 24564),
        ("3090", 71, 936, 24576),
    )
}
"""Memory is in MiB by ``nvidia-smi``: with ECC less than the data sheet's GB of 2**30 bytes."""


def local_gpu() -> Gpu | None:
    """This machine's first GPU, with the memory that its driver reports; None without one.

    A GPU that no row names gets an A100's peaks: a split depends on their ratio alone, and other
    GPUs' ratios are within a factor of 2.7 of it.
    """
    devices = machine.cuda_devices()
    if not devices:
        return None
    words = set(re.split(r"[\s-]+", devices[0].name.lower()))
    matches = [gpu for gpu in GPUS.values() if words >= set(gpu.name.split("-"))]
    peaks = max(matches, key=lambda gpu: gpu.name.count("-"), default=GPUS["a100"])
    return replace(peaks, name=devices[0].name, memory=devices[0].memory / 1e9)


def gpu_of(text: str) -> Gpu:
    """Parse a GPU's name or TFLOP/s,GB/s,GB. Raises ValueError naming what is allowed."""
    gpu = GPUS.get(text.lower())
    if gpu is not None:
        return gpu
    try:
        teraflops, bandwidth, memory = (float(part) for part in text.split(","))
    except ValueError:
        names = ", ".join(GPUS)
        raise ValueError(f"{text!r}: one of {names}, or TFLOP/s,GB/s,GB is needed") from None
    if not min(teraflops, bandwidth, memory) > 0:
        raise ValueError(f"{text!r}: more than 0 of each is needed")
    return Gpu(text, teraflops, bandwidth, memory)
