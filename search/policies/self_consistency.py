"""Self-consistency: independent chains without any reward, made for a majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.policies.best_of_n import BestOfN
from search.policies.policy import Scores


@dataclass(frozen=True, slots=True)
class SelfConsistency(BestOfN):
    """The chains of best of N, which need no reward model here."""

    scores: ClassVar[Scores] = Scores.NONE
