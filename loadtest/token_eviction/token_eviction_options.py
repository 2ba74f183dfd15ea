"""The options of a tree under token eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.token_allocation import Floors
from loadtest.token_eviction.token_eviction_policies import TOKEN_EVICTION


@dataclass(frozen=True, slots=True)
class TokenEvictionOptions:
    """``kv_policy``: one of ``TOKEN_EVICTION``. ``kv_tokens``: what one tree may hold.
    ``share``: of its tokens that a stream keeps, for policies of streams; ``floors``: what a block
    keeps at least, for the others. Raises ValueError."""

    kv_policy: str
    kv_tokens: int
    share: float = 1.0
    floors: Floors = field(default_factory=Floors)

    def __post_init__(self) -> None:
        if self.kv_policy not in TOKEN_EVICTION:
            raise ValueError(
                f"kv_policy: {self.kv_policy!r}; one of {', '.join(TOKEN_EVICTION)} is needed"
            )
        if self.kv_tokens < 1:
            raise ValueError(f"kv_tokens: {self.kv_tokens}; at least 1 is needed")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share}; more than 0 and at most 1 is needed")
