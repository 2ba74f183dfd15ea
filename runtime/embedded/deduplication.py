"""Branches that have drawn the same so far, computed once.

Siblings, and children of steps drawn alike, begin with one prefix. While their draws agree their
tokens are one path: one of them has a sequence, the others follow it, and each draws by its own
noise from the one row of logits, whose bits are those that it would have had alone. Where draws
differ, every new way gets a place of its own, which reads what was computed before they parted.

A draft guesses for the branch that has the sequence. Who follows it goes along what it takes of its
guesses, as far as their own draws are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.embedded.draft_verification import (
    SampledToken,
    SampleFunction,
    SampleRequest,
    VerifiedTokens,
    samples_for,
    verify,
)
from runtime.embedded.expand_call import BranchSequence, SharedPrefix
from search.tree import Finish

DedupKey = tuple[SharedPrefix, tuple[int, ...]]


def dedup_key(run: BranchSequence) -> DedupKey:
    """What branches have in common that may share a sequence."""
    return run.prefix, tuple(run.drawn)


def with_followers(run: BranchSequence) -> tuple[BranchSequence, ...]:
    """The branch that has the sequence, and those that follow it."""
    return run, *run.following


@dataclass(frozen=True, slots=True)
class FollowerTokens:
    """What became of those that followed a sequence: who has ended and why, and of the others, by
    the tokens that each was given, those that go on together. ``given`` and ``agreed``: of each,
    how many tokens it drew and how many of these as the one that has the sequence."""

    ended: list[tuple[BranchSequence, Finish]] = field(default_factory=list)
    ways: dict[tuple[int, ...], list[BranchSequence]] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)

    def parted(self, tokens: Sequence[int]) -> bool:
        """Whether one of them drew less than, or other than, these ``tokens``."""
        return any(count < len(tokens) for count in self.agreed)


def sample_together(
    draw: SampleFunction,
    passed: Sequence[tuple[BranchSequence, Tensor]],
    finish_of: Callable[[BranchSequence], Finish | None],
) -> list[tuple[BranchSequence, VerifiedTokens, FollowerTokens]]:
    """Give each branch that has a sequence its next tokens, and those that followed it theirs.

    ``passed``: the branches, each with its logits (1 + guesses, vocab) in the guesses' order.
    """
    if not passed:
        return []
    asked: list[SampleRequest] = []
    starts: list[int] = []
    rows = 0
    for run, logits in passed:
        asked.append((run, run.depths(), range(rows, rows + len(logits))))
        asked += [(one, [0], [rows]) for one in run.following]
        starts.append(rows)
        rows += len(logits)
    every = torch.cat([logits for _, logits in passed])
    drawn = iter(samples_for(draw, every, asked))
    found, agreeing = [], []
    ahead: list[int] = []
    further: list[SampleRequest] = []
    for (run, logits), start in zip(passed, starts, strict=True):
        taken = verify(run, logits, next(drawn), finish_of)
        draws = [next(drawn) for _ in run.following]
        found.append((run, taken, draws))
        pairs = zip(run.following, draws, strict=True)
        same = [(one, own) for one, own in pairs if own[0][0] == taken.tokens[0]]
        if same and len(taken.rows) > 1:
            places = range(len(ahead), len(ahead) + len(taken.rows) - 1)
            ahead += [start + row for row in taken.rows[1:]]
            agreeing += [own for _, own in same]
            further += [(one, range(1, len(taken.rows)), places) for one, _ in same]
    for own, more in zip(agreeing, samples_for(draw, every[ahead], further), strict=True):
        own += more
    return [(run, taken, _followed(run, taken, draws, finish_of)) for run, taken, draws in found]


def sample_followers(
    runs: Iterable[BranchSequence],
    draws: Sequence[Sequence[SampledToken]],
    tokens: Sequence[int],
    finish_of: Callable[[BranchSequence], Finish | None],
) -> FollowerTokens:
    """Give each branch its draws, as far as they are ``tokens``, those of the one it follows, and
    the first that is another. ``draws``: of each all, or the first alone if that is another."""
    found = FollowerTokens()
    for run, own in zip(runs, draws, strict=True):
        given, finish = 0, None
        for (token, logprob, entropy), theirs in zip(own, tokens, strict=False):
            run.drawn.append(token)
            run.logprob += logprob
            run.entropy = entropy
            given += 1
            finish = finish_of(run)
            if finish is not None or token != theirs:
                break
        found.given.append(given)
        found.agreed.append(given - (run.drawn[-1] != tokens[given - 1]))
        if finish is None:
            found.ways.setdefault(tuple(run.drawn[-given:]), []).append(run)
        else:
            found.ended.append((run, finish))
    return found


def _followed(
    run: BranchSequence,
    taken: VerifiedTokens,
    draws: Sequence[Sequence[SampledToken]],
    finish_of: Callable[[BranchSequence], Finish | None],
) -> FollowerTokens:
    following, run.following = run.following, []
    return sample_followers(following, draws, taken.tokens, finish_of)
