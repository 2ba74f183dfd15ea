"""Draws for branches: which noise, position and sampling belong to which row of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from runtime.embedded.draft_tree import DraftTree
from runtime.embedded.expand_call import BranchSequence
from runtime.embedded.rejection_sampling import CandidateOffer, choose, distribution
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
