"""What a method made of one item."""

from dataclasses import dataclass

from search.policies.policy import Round
from search.stats import SearchStats


@dataclass(frozen=True, slots=True)
class Result:
    """Right or not, the numbers and the digest; the tree itself is let go.

    ``rounds``: its decisions, for who wants to repeat them.
    """

    correct: bool
    any_correct: bool
    stats: SearchStats
    digest: str
    rounds: tuple[Round, ...]
