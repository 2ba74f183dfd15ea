"""What an embedded engine is started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.roofline import SplitLoad
from kvpolicy.value import ThetaError, load_theta
from runtime.embedded.choices import (
    DraftMode,
    EmbedderName,
    Kernel,
    KvPolicy,
    KvSplitMode,
    ScheduleOrder,
)
from runtime.embedded.eviction import ValueParams
from runtime.embedded.model.threads import thread_counts
from runtime.embedders.endpoint import EndpointOptions

LOAD = SplitLoad(sequences=64, length=256, new=64)
"""What KV is shared for where nothing else is said."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A setting by its own name; what it may be ``server.settings`` says and checks.

    ``policy`` and ``prm`` are checkpoint folders; without ``prm`` only a reward format that
    needs no model can score.

    ``kv_tokens`` and ``prm_kv_tokens``: capacity of each model's KV store in tokens;
    ``kv_split``: how the bytes of both are shared instead, for the load ``kv_load``.
    ``kv_policy``: what the policy model's store gives up first (the reward model's: the oldest);
    ``kv_theta``: a file with the coefficients by which ``arborkv`` values a block, None for none
    fitted; ``attention``: what steps attend to is told with them, although these do not ask for it.
    ``batch_limit``: the most sequences of a model in one batch. ``speculate``: idle places of the
    policy's batch are filled with steps that rounds may ask for next; ``lookahead``: such a step is
    scored along with the one before it; ``order``: in which a round's branches are let in;
    ``dedup``: what several branches have drawn alike is computed once.
    ``threads``: of the arithmetic; 0 is what is fastest here, at most one for each core.
    ``exact``: batch-invariant arithmetic; ``kernel``: what attends.
    ``strict``: wrong KV accounting ends the process instead of being logged and counted.
    ``version`` goes into the fingerprint. A process that owes an answer and says nothing for
    ``stall_seconds`` counts as down.

    ``draft``: whether the checkpoint ``draft_model`` drafts ahead of the policy, see
    ``runtime.embedded.speculative_decoding``; it changes time alone.
    ``draft_tokens``: how far, 0 to follow what was measured; ``k_config``: how many tokens at each
    depth after each one before it (deeper it is one); ``draft_kv_tokens``: the capacity of its KV
    store; ``verify_batch``: branches whose drafts are checked at once, 0 for all.

    ``embedder``: what embeds steps: letters alone, the policy's hidden states after
    ``embedder_layer`` layers (None: half of them), the checkpoint ``encoder``, or the server
    ``endpoint``.
    """

    policy: str | Path
    prm: str | Path | None = None
    reward_format: str = "math-shepherd"
    kv_tokens: int = 32_768
    prm_kv_tokens: int = 32_768
    kv_split: KvSplitMode = "given"
    kv_load: SplitLoad = LOAD
    kv_policy: KvPolicy = "arborkv"
    kv_theta: str | Path | None = None
    attention: bool = False
    batch_limit: int = 256
    draft: DraftMode = "off"
    draft_model: str | Path | None = None
    draft_tokens: int = 0
    draft_kv_tokens: int = 32_768
    k_config: tuple[int, ...] = ()
    verify_batch: int = 0
    speculate: bool = False
    lookahead: bool = True
    dedup: bool = True
    order: ScheduleOrder = "prefix"
    threads: int = 0
    exact: bool = True
    kernel: Kernel = "auto"
    strict: bool = False
    version: str = ""
    stall_seconds: float = 30.0
    embedder: EmbedderName = "lexical"
    embedder_layer: int | None = None
    encoder: str | Path | None = None
    endpoint: EndpointOptions | None = None

    def __post_init__(self) -> None:
        """What one setting asks of another. Raises ValueError naming them."""
        self.value_params()
        if self.draft != "off" and self.draft_model is None:
            raise ValueError(f"draft_model: None; draft {self.draft!r} needs one")
        for needed in ("encoder", "endpoint"):
            if self.embedder == needed and getattr(self, needed) is None:
                raise ValueError(f"{needed}: None; embedder {needed!r} needs one")
        if self.embedder_layer is not None and self.embedder != "hidden":
            read = "only the embedder 'hidden' reads after a layer"
            raise ValueError(f"embedder_layer: {self.embedder_layer}; {read}")

    def value_params(self) -> ValueParams:
        """How ``arborkv`` values a block. Raises ValueError naming file, field and value."""
        if self.kv_theta is None:
            return ValueParams(attends=self.attention)
        try:
            theta = load_theta(self.kv_theta)
        except ThetaError as error:
            raise ValueError(f"kv_theta: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            needed = "a file that hedgerow calibrate has written is needed"
            raise ValueError(f"kv_theta: {self.kv_theta}: {reason}; {needed}") from None
        if theta.mode != "exact":
            raise ValueError(
                f"kv_theta: {self.kv_theta}: mode: {theta.mode!r}; 'exact' is needed with "
                f"kv_policy {self.kv_policy!r}"
            )
        return ValueParams(theta, attends=self.attention)

    @property
    def same_trees(self) -> bool:
        """Whether trees follow from their requests, bit for bit."""
        return self.exact and self.embedder != "endpoint"

    @property
    def cores(self) -> int:
        """The most threads to compute with."""
        return self.threads or os.cpu_count() or 1

    @property
    def pass_threads(self) -> tuple[int, ...]:
        """The numbers of threads that a pass may have: one where bits may depend on it."""
        fixed = self.threads or not self.exact or self.embedder == "encoder"
        return (self.cores,) if fixed else thread_counts(self.cores)
