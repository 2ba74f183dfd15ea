"""Branches that have drawn the same so far, computed once.

Siblings, and children of steps drawn alike, begin with one prefix. While their draws agree their
tokens are one path: one of them has a lane, the others follow it, and each draws by its own noise
from the one row of logits, whose bits are those that it would have had alone. Where draws differ,
every new way gets a lane of its own, which reads what was computed before they parted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.embedded.drawing.branches import Prefix, Run
from runtime.embedded.drawing.draws import Token
from search.tree import Finish

Way = tuple[Prefix, tuple[int, ...]]


def way(run: Run) -> Way:
    """What branches have in common that may share a lane."""
    return run.prefix, tuple(run.drawn)


def everyone(run: Run) -> tuple[Run, ...]:
    """The branch that has the lane, and those that follow it."""
    return run, *run.following


@dataclass(frozen=True, slots=True)
class Followed:
    """What became of those that followed a lane: who has ended and why, and of the others, by the
    token that each has drawn, those that go on together."""

    ended: list[tuple[Run, Finish]] = field(default_factory=list)
    ways: dict[int, list[Run]] = field(default_factory=dict)


def follow(
    runs: Iterable[Run], draws: Sequence[Token], finish_of: Callable[[Run], Finish | None]
) -> Followed:
    """Give each branch its draw."""
    found = Followed()
    for run, (token, logprob, entropy) in zip(runs, draws, strict=True):
        run.drawn.append(token)
        run.logprob += logprob
        run.entropy = entropy
        finish = finish_of(run)
        if finish is None:
            found.ways.setdefault(token, []).append(run)
        else:
            found.ended.append((run, finish))
    return found
