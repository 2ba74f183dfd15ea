"""Profiles of policy model families: how each is asked to work in steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """How a family of policy models is asked to work in steps.

    ``delimiter`` ends a step; ``system`` is the system message that a search adds to a request that
    has none, None for no message.
    """

    name: str
    delimiter: str = "\n\n"
    system: str | None = None


_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_LLAMA_STEPS = r"""Solve the following math problem efficiently and clearly:

- For simple problems (2 steps or fewer):
Provide a concise solution with minimal explanation.

- For complex problems (3 steps or more):
Use this step-by-step format:

## Step 1: [Concise description]
[Brief explanation and calculations]

## Step 2: [Concise description]
[Brief explanation and calculations]

...

Regardless of the approach, always conclude with:

Therefore, the final answer is: $\boxed{answer}$. I hope it is correct.

Where [answer] is just the final number or expression that solves the problem."""
"""The prompt for Llama 3's models in search-and-learn, first used in Meta's own evaluation."""

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("sprig"),
        Profile("chat"),
        Profile("qwen", system=_BOXED),
        Profile("llama", system=_LLAMA_STEPS),
        Profile("llemma", delimiter="ки"),
        Profile("mistral-metamath", delimiter="ки"),
    )
}
"""Profiles by name; ``chat`` fits any chat model."""
