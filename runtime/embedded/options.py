"""What an embedded engine is started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, get_args

from kvpolicy.roofline import SplitLoad
from kvpolicy.value import ThetaError, load_theta
from runtime.embedded.draft_length import LONGEST
from runtime.embedded.eviction import KvPolicy, ValueParams
from runtime.embedded.model.native import Kernel
from runtime.embedded.model.threads import thread_counts
from runtime.embedded.schedule_order import ScheduleOrder
from runtime.embedders.endpoint import EndpointOptions
from runtime.reward_format import reward_format

WIDEST = 4
"""Candidates at a depth of ``k_config``."""

LOAD = SplitLoad(sequences=64, length=256, new=64)
"""What KV is shared for where nothing else is said."""

KvSplit = Literal["given", "even", "roofline"]
"""``given``: each pool as it is set; ``even``: half of the bytes of both each; ``roofline``: what
takes least time (FlashTTS, section 4.3.1), by peaks measured at the start."""


class Arithmetic(TypedDict):
    """Arguments of ``Forward``."""

    exact: bool
    kernel: Kernel


EmbedderName = Literal["hidden", "lexical", "encoder", "endpoint"]

DraftMode = Literal["off", "serial", "scheduled"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``policy`` and ``prm`` are checkpoint folders; without ``prm`` only a reward format that
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
    ``strict``: wrong books end the process instead of being logged and counted. ``version`` goes
    into the fingerprint. A process that owes an answer and says nothing for ``stall_seconds``
    counts as down.

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
    kv_split: KvSplit = "given"
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
        for field in ("kv_tokens", "prm_kv_tokens", "batch_limit", "draft_kv_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; at least 1 is needed")
        modes = {
            "kv_split": KvSplit,
            "kv_policy": KvPolicy,
            "draft": DraftMode,
            "order": ScheduleOrder,
            "kernel": Kernel,
        }
        for field, known in modes.items():
            if getattr(self, field) not in get_args(known):
                allowed = ", ".join(get_args(known))
                raise ValueError(f"{field}: {getattr(self, field)!r}; one of {allowed} is needed")
        self._check_draft()
        self.worth()
        reward_format(self.reward_format)
        if self.threads < 0:
            raise ValueError(f"threads: {self.threads}; 0 (the fastest) or more is needed")

        if self.embedder not in get_args(EmbedderName):
            allowed = ", ".join(get_args(EmbedderName))
            raise ValueError(f"embedder: {self.embedder!r}; one of {allowed} is needed")
        for needy in ("encoder", "endpoint"):
            if self.embedder == needy and getattr(self, needy) is None:
                raise ValueError(f"{needy}: None; embedder {needy!r} needs one")
        if self.embedder_layer is not None and self.embedder != "hidden":
            read = "only the embedder 'hidden' reads after a layer"
            raise ValueError(f"embedder_layer: {self.embedder_layer}; {read}")

    def _check_draft(self) -> None:
        if not 0 <= self.draft_tokens <= LONGEST:
            raise ValueError(f"draft_tokens: {self.draft_tokens}; from 0 to {LONGEST} is needed")
        if not all(1 <= width <= WIDEST for width in self.k_config):
            raise ValueError(f"k_config: {self.k_config}; widths from 1 to {WIDEST} are needed")
        if len(self.k_config) > LONGEST:
            raise ValueError(
                f"k_config: {len(self.k_config)} depths; at most {LONGEST} are allowed"
            )
        if self.verify_batch < 0:
            raise ValueError(f"verify_batch: {self.verify_batch}; 0 (all) or more is needed")
        if self.draft != "off" and self.draft_model is None:
            raise ValueError(f"draft_model: None; draft {self.draft!r} needs one")

    def worth(self) -> ValueParams:
        """How ``arborkv`` values a block. Raises ValueError naming file, field and value."""
        if self.kv_theta is None:
            return ValueParams(attends=self.attention)
        try:
            theta = load_theta(self.kv_theta)
        except ThetaError as error:
            raise ValueError(f"kv_theta: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            needed = "a file that hedgerow calibrate has written is needed"
            raise ValueError(f"kv_theta: {self.kv_theta}: {said}; {needed}") from None
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
    def arithmetic(self) -> Arithmetic:
        """How a model that says what is in an answer is computed."""
        return {"exact": self.exact, "kernel": self.kernel}

    @property
    def cores(self) -> int:
        """The most threads to compute with."""
        return self.threads or os.cpu_count() or 1

    @property
    def pass_threads(self) -> tuple[int, ...]:
        """The numbers of threads that a pass may have: one where bits may depend on it."""
        fixed = self.threads or not self.exact or self.embedder == "encoder"
        return (self.cores,) if fixed else thread_counts(self.cores)
