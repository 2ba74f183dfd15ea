"""What this machine offers for running models: free memory, CUDA devices, a Python with SGLang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
SGLANG_ENVIRONMENT = Path(".venv-sglang/bin/python")
"""The Python of the environment that ``make sglang-env`` creates."""
SMI_SECONDS = 20.0
"""The most seconds to wait for ``nvidia-smi``; its first call after boot loads the driver."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU: its name, and its memory in bytes."""

    name: str
    memory: int


@cache
def cuda_devices() -> tuple[CudaDevice, ...]:
    """The GPUs that a process started here may use, by ``nvidia-smi``: no torch is imported.

    ``CUDA_VISIBLE_DEVICES`` is respected. Empty if there is no driver or it does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    smi = shutil.which("nvidia-smi")
    if smi is None or visible in ("", "-1"):
        return ()
    command = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    command += [] if visible is None else ["-i", visible]
    with suppress(OSError, subprocess.SubprocessError):
        query = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SMI_SECONDS
        )
        return tuple(device for line in query.stdout.splitlines() if (device := _device(line)))
    return ()


def _device(line: str) -> CudaDevice | None:
    """Parse a line such as ``NVIDIA H100 80GB HBM3, 81559`` (MiB); None without the memory."""
    name, _, mebibytes = line.rpartition(", ")
    return CudaDevice(name, int(mebibytes) << 20) if mebibytes.strip().isdecimal() else None


def launch_device() -> Literal["cuda", "cpu"]:
    """The device that SGLang runs on here: ``cuda`` if there is a CUDA device, else ``cpu``."""
    return "cuda" if cuda_devices() else "cpu"


def sglang_python() -> Path:
    """The Python that has SGLang: this one if it can import it, else ``SGLANG_ENVIRONMENT``, which
    may not exist."""
    return Path(sys.executable) if find_spec("sglang") else SGLANG_ENVIRONMENT


def free_memory() -> int | None:
    """The bytes of memory that processes started here may use; None if that is unknown."""
    sizes = [size for size in (_available(), _free_in_container()) if size is not None]
    return min(sizes, default=None)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _free_in_container() -> int | None:
    """The bytes left under a container's limit, with cached files counted as free."""
    with suppress(OSError, ValueError):
        most = int((CGROUP / "memory.max").read_text())
        usage = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, most - usage + cached)
    return None
