"""What an embedded engine is started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from runtime.embedded.retention import KvPolicy
from runtime.embedders.endpoint import EndpointOptions
from runtime.reward_format import reward_format

EmbedderName = Literal["hidden", "lexical", "encoder", "endpoint"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``policy`` and ``prm`` are checkpoint folders; without ``prm`` only a reward format that
    needs no model can score.

    ``kv_tokens`` and ``prm_kv_tokens``: capacity of each model's KV store in tokens;
    ``kv_policy``: what the policy model's store gives up first (the reward model's: the oldest).
    ``batch_limit``: the most sequences of a model in one batch. ``threads``: of the arithmetic; 0
    is one for each core. ``exact``: batch-invariant arithmetic. ``strict``: wrong books end the
    process instead of being logged and counted. ``version`` goes into the fingerprint. A process
    that owes an answer and says nothing for ``stall_seconds`` counts as down.

    ``embedder``: what embeds steps: the policy's hidden states after ``embedder_layer`` layers
    (None: half of them), letters alone, the checkpoint ``encoder``, or the server ``endpoint``.
    """

    policy: str | Path
    prm: str | Path | None = None
    reward_format: str = "math-shepherd"
    kv_tokens: int = 32_768
    prm_kv_tokens: int = 32_768
    kv_policy: KvPolicy = "arborkv"
    batch_limit: int = 256
    threads: int = 0
    exact: bool = True
    strict: bool = False
    version: str = ""
    stall_seconds: float = 60.0
    embedder: EmbedderName = "hidden"
    embedder_layer: int | None = None
    encoder: str | Path | None = None
    endpoint: EndpointOptions | None = None

    def __post_init__(self) -> None:
        for field in ("kv_tokens", "prm_kv_tokens", "batch_limit"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; at least 1 is needed")
        if self.kv_policy not in get_args(KvPolicy):
            allowed = ", ".join(get_args(KvPolicy))
            raise ValueError(f"kv_policy: {self.kv_policy!r}; one of {allowed} is needed")
        reward_format(self.reward_format)
        if self.threads < 0:
            raise ValueError(f"threads: {self.threads}; 0 (one for each core) or more is needed")

        if self.embedder not in get_args(EmbedderName):
            allowed = ", ".join(get_args(EmbedderName))
            raise ValueError(f"embedder: {self.embedder!r}; one of {allowed} is needed")
        for needy in ("encoder", "endpoint"):
            if self.embedder == needy and getattr(self, needy) is None:
                raise ValueError(f"{needy}: None; embedder {needy!r} needs one")

    @property
    def cores(self) -> int:
        """Threads to compute with."""
        return self.threads or os.cpu_count() or 1
