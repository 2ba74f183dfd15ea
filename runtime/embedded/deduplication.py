"""Sampling for branches: what a draft foresaw is verified, and what several have in common is
computed once.

Siblings, and children of equal steps, begin with one prefix. While they sample the same their
tokens are one path: one of them has a sequence, the others follow it, and each samples by its own
noise from the one row of logits, whose bits are those that it would have had alone. Where they
diverge, every new way gets a sequence of its own, which reads what was computed before.

A draft is for the branch that has the sequence. Who follows it goes along what it takes of its
draft tokens, as far as their own samples are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.draft_tree import DraftTree
from runtime.embedded.sampler import sample
from runtime.embedded.sequence import BranchSequence, SampledToken, SharedPrefix
from search.tree import Finish

SampleRequest = tuple[BranchSequence, Sequence[int], Sequence[int]]
"""A branch that draws, each time after so many tokens more than it has, and from which rows."""


SampleFunction = Callable[[torch.Tensor, Sequence[SampleRequest]], list[list[SampledToken]]]
"""``samples_for``, or another rule: what each request samples from its rows of (rows, vocab)."""


def samples_for(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[list[SampledToken]]:
    """The tokens of each branch from its rows of ``logits`` (rows, vocab), which may be shared."""
    if not requests:
        return []
    each = [(run, ahead) for run, depths, _ in requests for ahead in depths]
    sampled = sample(
        logits,
        np.array([run.branch.seed for run, _ in each], dtype=np.uint64),
        np.array([run.position + ahead for run, ahead in each], dtype=np.int64),
        np.array([run.call.sampling.temperature for run, _ in each]),
        np.array([run.call.sampling.top_p for run, _ in each]),
        np.array([row for *_, rows in requests for row in rows], dtype=np.int64),
    )
    tokens = zip(*(part.tolist() for part in sampled), strict=True)
    return [list(islice(tokens, len(depths))) for _, depths, _ in requests]


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """What became of a pass's draws: the ``tokens`` drawn, each from one of the pass's ``rows``,
    why the step ended with the last one (None: it goes on), the guesses there were, how many draws
    had some (``tested``) and how many of those were among them."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    finish: Finish | None
    guesses: DraftTree
    tested: int
    accepted: int


def verify(
    run: BranchSequence,
    draws: Sequence[SampledToken],
    finish_of: Callable[[BranchSequence], Finish | None],
) -> VerifiedTokens:
    """Give a branch its draws, as far as each was foreseen and the step goes on.

    ``draws``: one for each row of its guesses, in their order.
    """
    guesses, tested, accepted = run.retract(), 0, 0
    rows: list[int] = []
    way, depth = None, 0
    while True:
        rows.append(guesses.row(way, depth))
        token = run.decoded(draws[rows[-1]])
        foreseen = dict(guesses.at(way, depth))
        tested += bool(foreseen)
        accepted += token in foreseen
        finish = finish_of(run)
        if finish is not None or token not in foreseen:
            break
        way = foreseen[token]
        run.confirm(token, way, depth)
        depth += 1
    if finish is None:
        run.append(token)
    given = tuple(run.drawn[-len(rows) :])
    return VerifiedTokens(given, tuple(rows), finish, guesses, tested, accepted)


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
    requests: list[SampleRequest] = []
    starts: list[int] = []
    rows = 0
    for run, logits in passed:
        requests.append((run, run.depths(), range(rows, rows + len(logits))))
        requests += [(one, [0], [rows]) for one in run.following]
        starts.append(rows)
        rows += len(logits)
    every = torch.cat([logits for _, logits in passed])
    drawn = iter(draw(every, requests))
    found, agreeing = [], []
    ahead: list[int] = []
    further: list[SampleRequest] = []
    for (run, _), start in zip(passed, starts, strict=True):
        taken = verify(run, next(drawn), finish_of)
        draws = [next(drawn) for _ in run.following]
        found.append((run, taken, draws))
        pairs = zip(run.following, draws, strict=True)
        same = [(one, own) for one, own in pairs if own[0][0] == taken.tokens[0]]
        if same and len(taken.rows) > 1:
            places = range(len(ahead), len(ahead) + len(taken.rows) - 1)
            ahead += [start + row for row in taken.rows[1:]]
            agreeing += [own for _, own in same]
            further += [(one, range(1, len(taken.rows)), places) for one, _ in same]
    for own, more in zip(agreeing, draw(every[ahead], further), strict=True):
        own += more
    together = []
    for run, taken, draws in found:
        followers, run.following = run.following, []
        followed = sample_followers(followers, draws, taken.tokens, finish_of)
        together.append((run, taken, followed))
    return together


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
        for sampled, theirs in zip(own, tokens, strict=False):
            token = run.decoded(sampled)
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
