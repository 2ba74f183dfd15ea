"""Draws for branches: which noise, position and sampling belong to which row of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from runtime.embedded.drafting.guesses import Guesses
from runtime.embedded.drafting.leviathan import Offer, choose, distribution
from runtime.embedded.drawing.branches import Run
from search.tree import Finish

Token = tuple[int, float, float]
"""A token with its log-probability and the entropy before it."""


class Draw(Protocol):
    """``runtime.embedded.drawing.sampler.draw``: one token, log-probability and entropy a row."""

    def __call__(
        self,
        logits: torch.Tensor,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


def draw_for(
    draw: Draw, rows: Sequence[tuple[Run, torch.Tensor]]
) -> Iterator[tuple[Run, torch.Tensor, list[Token]]]:
    """Each branch with its logits (1 + guesses, vocab) and its draws, one for each row."""
    if not rows:
        return
    each = [(run, ahead) for run, _ in rows for ahead in (run.lane.depths() if run.lane else [0])]
    drawn = draw(
        torch.cat([logits for _, logits in rows]),
        np.array([run.branch.seed for run, _ in each], dtype=np.uint64),
        np.array([run.length + ahead for run, ahead in each], dtype=np.int64),
        np.array([run.call.sampling.temperature for run, _ in each]),
        np.array([run.call.sampling.top_p for run, _ in each]),
    )
    tokens = zip(*(np.asarray(part).tolist() for part in drawn), strict=True)
    for run, logits in rows:
        yield run, logits, list(islice(tokens, len(logits)))


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a pass's draws: so many ``drawn`` tokens, why the step ended with the last
    one (None: it goes on), the guesses there were, how many draws had some (``tested``) and how
    many of those were among them."""

    drawn: int
    finish: Finish | None
    guesses: Guesses
    tested: int
    accepted: int


def take(
    run: Run,
    logits: torch.Tensor,
    draws: Sequence[Token],
    finish_of: Callable[[Run], Finish | None],
) -> Taken:
    """Give a branch its draws, as far as each was foreseen and the step goes on.

    ``logits`` (rows, vocab) and ``draws``: one for each row of its guesses, in their order. Where a
    guess was an offer, the draw is made by rejection instead.
    """
    lane = run.lane
    assert lane is not None, "a run draws without a lane"
    guesses, tested, accepted = lane.retract(), 0, 0
    way, depth = None, 0
    while True:
        row = guesses.row(way, depth)
        token, logprob, entropy = draws[row]
        foreseen = dict(guesses.at(way, depth))
        offer = guesses.offers.get((way, depth))
        if offer is not None:
            token, logprob = _by_rejection(run, logits[row], offer)
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
        lane.confirm(token, way, depth)
        depth += 1
    if finish is None:
        lane.append(token)
    return Taken(depth + 1, finish, guesses, tested, accepted)


def _by_rejection(run: Run, logits: torch.Tensor, offer: Offer) -> tuple[int, float]:
    """The branch's next token and its log-probability, from logits (vocab,)."""
    sampling = run.call.sampling
    p = distribution(logits.numpy(), sampling.temperature, sampling.top_p)
    token = choose(p, offer, run.branch.seed, run.length)
    return token, float(logits.double().log_softmax(-1)[token])
