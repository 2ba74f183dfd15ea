"""What a tree under token eviction has cost."""

from __future__ import annotations

from dataclasses import dataclass

from search.engine import TreeCost


@dataclass(slots=True)
class TokenEvictionCost:
    """What a tree has cost. ``rehydrations``: paths that were made whole again, by computing
    ``rehydrated`` tokens in ``again_seconds``; ``prefilled``: rows that drew nothing, those
    included; ``peak``: tokens held at most, ``active``: of them those that a wave was reading or
    writing; ``policy_seconds``: deciding what goes."""

    decoded: int = 0
    prefilled: int = 0
    rehydrations: int = 0
    rehydrated: int = 0
    passes: int = 0
    flops: float = 0.0
    peak: int = 0
    active: int = 0
    again_seconds: float = 0.0
    policy_seconds: float = 0.0

    def cost(self) -> TreeCost:
        """As the search counts it."""
        return TreeCost(
            decoded_tokens=self.decoded,
            prefilled_tokens=self.prefilled,
            model_calls=self.passes,
            flops=self.flops,
            kv_tokens_peak=self.peak,
            rehydrated_tokens=self.rehydrated,
            rehydrations=self.rehydrations,
        )
