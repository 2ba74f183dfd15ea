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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.draft_tree import DraftTree
from runtime.embedded.rejection_sampling import CandidateOffer, choose, distribution
from runtime.embedded.sequence import BranchSequence, SharedPrefix
from search.tree import Finish

SampledToken = tuple[int, float, float]
"""A token with its log-probability and the entropy before it."""

SampleRequest = tuple[BranchSequence, Sequence[int], Sequence[int]]
"""A branch that draws, each time after so many tokens more than it has, and from which rows."""


class SampleFunction(Protocol):
    """``runtime.embedded.sampler.sample``: a token, log-probability and entropy a draw."""

    def __call__(
        self,
        logits: torch.Tensor,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
        rows: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


def samples_for(
    draw: SampleFunction, logits: torch.Tensor, asked: Sequence[SampleRequest]
) -> list[list[SampledToken]]:
    """The draws of each branch from its rows of ``logits`` (rows, vocab); several may share one."""
    if not asked:
        return []
    each = [(run, ahead) for run, depths, _ in asked for ahead in depths]
    drawn = draw(
        logits,
        np.array([run.branch.seed for run, _ in each], dtype=np.uint64),
        np.array([run.position + ahead for run, ahead in each], dtype=np.int64),
        np.array([run.call.sampling.temperature for run, _ in each]),
        np.array([run.call.sampling.top_p for run, _ in each]),
        np.array([row for *_, rows in asked for row in rows], dtype=np.int64),
    )
    tokens = zip(*(np.asarray(part).tolist() for part in drawn), strict=True)
    return [list(islice(tokens, len(depths))) for _, depths, _ in asked]


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
    logits: torch.Tensor,
    draws: Sequence[SampledToken],
    finish_of: Callable[[BranchSequence], Finish | None],
) -> VerifiedTokens:
    """Give a branch its draws, as far as each was foreseen and the step goes on.

    ``logits`` (rows, vocab) and ``draws``: one for each row of its guesses, in their order. Where a
    guess was an offer, the draw is made by rejection instead.
    """
    guesses, tested, accepted = run.retract(), 0, 0
    rows: list[int] = []
    way, depth = None, 0
    while True:
        rows.append(guesses.row(way, depth))
        token, logprob, entropy = draws[rows[-1]]
        foreseen = dict(guesses.at(way, depth))
        offer = guesses.offers.get((way, depth))
        if offer is not None:
            token, logprob = _by_rejection(run, logits[rows[-1]], offer)
        run.drawn.append(token)
        run.logprob += logprob
        run.entropy = entropy
        candidates = foreseen if offer is None else offer.candidates
        tested += bool(candidates)
        accepted += token in candidates
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


def _by_rejection(
    run: BranchSequence, logits: torch.Tensor, offer: CandidateOffer
) -> tuple[int, float]:
    """The branch's next token and its log-probability, from logits (vocab,)."""
    sampling = run.call.sampling
    p = distribution(logits.numpy(), sampling.temperature, sampling.top_p)
    token = choose(p, offer, run.branch.seed, run.position)
    return token, float(logits.double().log_softmax(-1)[token])


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
