"""The engine's fingerprint: a digest of everything but the request that a tree's bits depend on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from runtime.embedded.model.layers import PACKED
from runtime.embedded.options import EngineOptions
from runtime.reward_format import reward_format

_READ_BYTES = 2**20


def fingerprint(options: EngineOptions, attends: str) -> str:
    """``hedgerow-`` and 16 hex digits of a hash over the models' files (names, sizes, first MiB),
    the reward format, the embedder, exactness, the thread count if bits may depend on it, torch's
    version, the instruction set, packed weights, what ``attends`` and Hedgerow's version."""
    names = [
        options.version,
        repr(reward_format(options.reward_format)),
        _embedder(options),
        "exact" if options.exact else "plain",
        *_threads(options),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        "packed" if PACKED else "plain",
        attends,
    ]
    digest = hashlib.sha256("\0".join(names).encode())
    for checkpoint in (options.policy, options.prm, options.encoder):
        if checkpoint is not None:
            _add_files(digest, Path(checkpoint))
    return f"hedgerow-{digest.hexdigest()[:16]}"


def _threads(options: EngineOptions) -> list[str]:
    """The thread count, unless arithmetic is exact: an encoder's never is."""
    return [] if options.exact and options.embedder != "encoder" else [str(options.cores)]


def _embedder(options: EngineOptions) -> str:
    """The embedder's name and its setting; for an endpoint the model's name, not the address."""
    setting = options.embedder_layer if options.embedder == "hidden" else None
    if options.embedder == "endpoint" and options.endpoint is not None:
        setting = options.endpoint.model
    return f"{options.embedder} {setting}"


def _add_files(digest: hashlib._Hash, checkpoint: Path) -> None:
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in {".json", ".safetensors"}:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_READ_BYTES))
