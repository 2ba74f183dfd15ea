"""Whether a search that has its next steps drawn early asks for enough of them."""

from __future__ import annotations

TRIAL_TOKENS = 512
"""Tokens drawn early after which a search's luck is known."""
LEAST = 0.25
"""Share of its early tokens that a search must have used to have more drawn."""


def lucky(used: int, wasted: int) -> bool:
    """False once enough is known and too little was used. In tokens."""
    settled = used + wasted
    return settled < TRIAL_TOKENS or used >= LEAST * settled
