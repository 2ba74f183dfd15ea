"""What a tree in paper mode is drawn with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.extractive import Floors
from runtime.lossy.policies import LOSSY


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """``kv_policy``: one of ``runtime.lossy.policies.LOSSY``. ``kv_tokens``: what one tree may
    hold. ``share``: of its tokens that a stream keeps, for policies of streams; ``floors``: what a
    block keeps at least, for the others. Raises ValueError."""

    kv_policy: str
    kv_tokens: int
    share: float = 1.0
    floors: Floors = field(default_factory=Floors)

    def __post_init__(self) -> None:
        if self.kv_policy not in LOSSY:
            raise ValueError(f"kv_policy: {self.kv_policy!r}; one of {', '.join(LOSSY)} is needed")
        if self.kv_tokens < 1:
            raise ValueError(f"kv_tokens: {self.kv_tokens}; at least 1 is needed")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share}; more than 0 and at most 1 is needed")
