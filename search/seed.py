"""Random streams by name: every node's noise follows from the request's seed and its path alone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def node_seed(request_seed: int, purpose: str, path: Sequence[int]) -> int:
    """The 64-bit noise seed of the node at ``path`` (child indices from the root).

    ``purpose`` keeps streams apart that share a path, such as drawing a step and judging it.
    """
    name = purpose.encode()
    data = struct.pack(f"<QI{len(path)}I", request_seed, len(name), *path) + name
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def step_seed(request_seed: int, path: Sequence[int]) -> int:
    """The noise seed by which the step of the node at ``path`` is drawn, whenever that is."""
    return node_seed(request_seed, "step", path)
