"""The attention kernels that are available on this machine."""

from __future__ import annotations

from runtime.embedded.model.native import NotBuilt, native


def _kernels() -> tuple[str, ...]:
    try:
        native()
    except NotBuilt:
        return ("torch",)
    return "torch", "native"


KERNELS = _kernels()
"""Torch everywhere, the compiled library where there is a C compiler."""
