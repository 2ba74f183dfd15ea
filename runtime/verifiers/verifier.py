"""What a verifier is: code of the operator's choice that gives numbers for steps.

It is called once a round, with a list that holds for each path the question and the steps down to
the one that is judged; it answers with one number in [0, 1] for each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from search.engine import VerifierFailed
from search.tree import round_reward

BUNDLED_VERIFIERS = {"arithmetic": "runtime.verifiers.stated_arithmetic:verify"}
URLS = ("http://", "https://")


class Judged(TypedDict):
    """A path: the user's question, and the texts of its steps, of which the last is judged."""

    question: str
    steps: list[str]


@dataclass(frozen=True, slots=True)
class VerifierOptions:
    """``name``: of a bundled verifier, ``module:function``, or a URL. ``seconds``: limit of a call.

    ``processes``: calls of a Python function that run at once, each in its own process.
    ``pure``: its numbers depend only on its input; a function may say so itself.
    ``key`` is sent to a URL as a bearer token.
    """

    name: str
    seconds: float = 10.0
    processes: int = 2
    pure: bool = False
    key: str | None = field(default=None, repr=False)


class Verifier(Protocol):
    """A running verifier. ``fingerprint`` identifies what its numbers depend on, as far as that is
    known."""

    @property
    def pure(self) -> bool:
        """Whether its numbers depend only on its input."""
        ...

    @property
    def fingerprint(self) -> str:
        """``verifier-`` and 8 hex digits."""
        ...

    async def verify(self, batch: Sequence[Judged]) -> list[float]:
        """A number in [0, 1] for each. Raises VerifierFailed."""
        ...

    async def close(self) -> None:
        """End its processes or connections."""
        ...


def must_be_scores(answer: Any, count: int) -> list[float]:
    """A verifier's answer, rounded as rewards are. Raises VerifierFailed naming what is wrong."""
    if not isinstance(answer, list):
        raise VerifierFailed(f"the verifier gave {type(answer).__name__}; a list is needed")
    if len(answer) != count:
        raise VerifierFailed(f"the verifier gave {len(answer)} numbers for {count} steps")
    for value in answer:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or math.isnan(value) or not 0 <= value <= 1:
            description = value if number else type(value).__name__
            raise VerifierFailed(f"the verifier gave {description}; numbers from 0 to 1 are needed")
    return [round_reward(float(value)) for value in answer]


def fingerprint_of(*parts: str) -> str:
    """``verifier-`` and 8 hex digits over the parts."""
    return f"verifier-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:8]}"
