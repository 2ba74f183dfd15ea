"""What a search comes back with."""

from __future__ import annotations

from dataclasses import dataclass

from search.engine import Reproducible
from search.spec import SearchSpec, StopReason
from search.stats import SearchStats
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class AnswerClass:
    """Finished trajectories with the same answer.

    ``weight`` is what the vote counted: the sum of last rewards, the number of members, or the best
    member's score. ``count``: members. ``reply``: the node of the member that speaks for them.
    """

    answer: str
    weight: float
    count: int
    reply: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A searched tree and what was made of it.

    ``chosen``: node id of the trajectory whose ``text`` is the reply, None when nothing finished;
    of an open path when a budget of tokens was met before that; a node above the last dead one when
    every branch died.
    ``answer``: the winning class's, None when no answer could be extracted. ``answers``: all
    classes by falling weight. ``vote``: the rule that was applied, a fall-back included.
    ``reproducible``: what the engine says of itself.
    """

    tree: Tree
    answer: str | None
    chosen: int | None
    text: str
    answers: tuple[AnswerClass, ...]
    stop_reason: StopReason
    vote: str
    stats: SearchStats
    digest: str
    spec: SearchSpec
    reproducible: Reproducible
