"""The options that an embedded engine is started with."""

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
"""The load that KV is shared for by default."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Each option is the setting of the same name; ``server.settings`` says and checks its values.

    ``policy`` and ``prm`` are checkpoint folders; without ``prm`` only a reward format that
    needs no model can score.

    ``kv_tokens`` and ``prm_kv_tokens``: capacity of each model's KV store in tokens;
    ``kv_split``: how the bytes of both are shared instead, for the load ``kv_load``.
    ``kv_policy``: what is evicted first from the policy's store (the reward model's: the oldest);
    ``kv_theta``: a file with the coefficients by which ``arborkv`` values a block, None if none are
    fitted; ``attention``: report what steps attend to even if the coefficients do not use it.
    ``batch_limit``: the most sequences of a model in one batch. ``speculate``: fill idle places of
    the policy's batch with steps that rounds may ask for next; ``lookahead``: score such a step
    along with the one before it; ``order``: the order in which a round's branches are admitted;
    ``dedup``: compute once what several branches have sampled alike.
    ``threads``: threads that compute; 0 chooses the fastest number, at most one per core.
    ``exact``: batch-invariant arithmetic; ``kernel``: what computes attention.
    ``strict``: wrong KV accounting ends the process instead of being logged and counted.
    ``version`` goes into the fingerprint. A process that owes an answer and sends nothing for
    ``stall_seconds`` counts as down.

    ``draft``: whether the checkpoint ``draft_model`` drafts ahead of the policy, see
    ``runtime.embedded.speculative_decoding``; it changes time only.
    ``draft_tokens``: draft length, 0 to choose it by measurement; ``k_config``: how many tokens at
    each depth after each draft token before it (deeper: one); ``draft_kv_tokens``: the capacity of
    its KV store; ``verify_batch``: branches whose drafts are verified at once, 0 for all.

    ``embedder``: what embeds steps: the text's letters, the policy's hidden states after
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
        """Check options that need one another. Raises ValueError naming them."""
        self.value_params()
        if self.draft != "off" and self.draft_model is None:
            raise ValueError(f"draft_model: None; draft {self.draft!r} needs one")
        for field in ("encoder", "endpoint"):
            if self.embedder == field and getattr(self, field) is None:
                raise ValueError(f"{field}: None; embedder {field!r} needs one")
        if self.embedder_layer is not None and self.embedder != "hidden":
            reason = "only the embedder 'hidden' reads after a layer"
            raise ValueError(f"embedder_layer: {self.embedder_layer}; {reason}")

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
        """Whether equal requests give the same trees, bit for bit."""
        return self.exact and self.embedder != "endpoint"

    @property
    def cores(self) -> int:
        """The most threads to compute with."""
        return self.threads or os.cpu_count() or 1

    @property
    def pass_threads(self) -> tuple[int, ...]:
        """The thread counts that a pass may use: only one if bits may depend on the count."""
        fixed = self.threads or not self.exact or self.embedder == "encoder"
        return (self.cores,) if fixed else thread_counts(self.cores)
