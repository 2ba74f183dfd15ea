"""The outcome of a search."""

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
    member's score. ``count``: members. ``reply``: node id of the member that is the class's reply.
    """

    answer: str
    weight: float
    count: int
    reply: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A searched tree, its answer and its statistics.

    ``chosen``: node id of the trajectory whose ``text`` is the reply, None when nothing finished;
    an open path's when a token budget was met before that; the parent of the last dead node when
    every branch died.
    ``answer``: the winning class's, None when no answer could be extracted. ``answers``: all
    classes by falling weight. ``vote``: the rule that was applied, a fall-back included.
    ``reproducible``: as in the engine's ``Capabilities``.
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
