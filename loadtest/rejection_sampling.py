"""Speculative sampling by rejection (Leviathan et al., with several candidates: MCSD, Yang et al.).

Candidates are drawn from the draft's distribution without replacement. Each is accepted with
probability min(1, p(x) / q(x)); after a rejection p becomes what of it exceeds q, and q loses the
candidate. What is drawn has the target's distribution exactly, but which token it is depends on the
draft, and on where there was one: the digest promise does not hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hedgerow_sglang.noise import gumbel, hashes
from runtime.embedded.batch import Forwards
from runtime.embedded.deduplication import SampleRequest, samples_for
from runtime.embedded.draft_model import DraftModel, DraftWay
from runtime.embedded.draft_tree import DraftBranch
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import nucleus
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.sequence import BranchSequence, SampledToken
from runtime.embedded.speculative_decoding import load_speculative_decoder
from runtime.text import Text

Floats = NDArray[np.float64]

CANDIDATES, TRIAL, REST = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
"""Turn a branch's seed into those of the draft's candidates, of the trials and of what is left."""


@dataclass(frozen=True, slots=True)
class CandidateOffer:
    """``candidates`` drawn one after the other, without replacement, from ``q`` (vocab,)."""

    candidates: tuple[int, ...]
    q: Floats


def distribution(logits: NDArray[np.float32], temperature: float, top_p: float) -> Floats:
    """What is sampled from after temperature and top-p: probabilities (vocab,), exactly 0 outside.

    Temperature 0 is the likeliest token alone.
    """
    weight = np.zeros(len(logits))
    if temperature == 0:
        weight[logits.argmax()] = 1.0
        return weight
    tempered = logits.astype(np.float64) / temperature
    kept = nucleus(tempered, top_p) if top_p < 1.0 else np.ones(len(logits), dtype=np.bool_)
    weight[kept] = np.exp(tempered[kept] - tempered.max())
    return weight / weight.sum()


def trials(p: Floats, offer: CandidateOffer) -> tuple[list[float], Floats]:
    """The probability of accepting each candidate once those before it were rejected, and the
    distribution (vocab,) to draw from after the last rejection."""
    p, q, chances = p.copy(), offer.q.copy(), []
    for token in offer.candidates:
        chances.append(min(1.0, p[token] / q[token]))
        if chances[-1] == 1.0:
            break
        p = np.maximum(p - q, 0.0)
        p /= p.sum()
        q[token] = 0.0
        if not q.any():
            break
        q /= q.sum()
    return chances, p


def choose(p: Floats, offer: CandidateOffer, seed: int, position: int) -> int:
    """The token for a position, by noise that follows from the branch's seed and the position."""
    chances, rest = trials(p, offer)
    luck = hashes(np.array([seed ^ TRIAL], np.uint64), [position], len(chances))[0] / 2.0**32
    for token, chance, drawn in zip(offer.candidates, chances, luck, strict=False):
        if drawn < chance:
            return token
    noise = gumbel(np.array([seed ^ REST], np.uint64), [position], len(rest))[0]
    with np.errstate(divide="ignore"):
        return int((np.log(rest) + noise).argmax())


Offers = dict[tuple[DraftBranch | None, int], CandidateOffer]
"""By a way in a draft tree and the depth on it."""


class RejectionDraftModel(DraftModel):
    """Draft tokens are sampled by a noise of their own, and kept with what they were drawn from
    until the target's pass has accepted or rejected them."""

    noise = CANDIDATES

    def __init__(self, *forward: Any, **options: Any) -> None:
        super().__init__(*forward, **options)
        self._offers = defaultdict[BranchSequence, Offers](dict)

    def end(self, run: BranchSequence, *, publish: bool) -> None:
        self._offers.pop(run, None)
        super().end(run, publish=publish)

    def rank(self, ways: Sequence[DraftWay], logits: Tensor) -> list[list[int]]:
        ranked = super().rank(ways, logits)
        for (builder, way), tokens, row in zip(ways, ranked, logits.numpy(), strict=True):
            sampling = builder.run.call.sampling
            q = distribution(row, sampling.temperature, sampling.top_p)
            candidates = tuple(token for token in tokens[: builder.width(way)] if token >= 0)
            self._offers[builder.run][way, builder.depth(way)] = CandidateOffer(candidates, q)
        return ranked

    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[list[SampledToken]]:
        """``samples_for``, but by rejection where a token was offered."""
        samples = samples_for(logits, requests)
        for (run, _, rows), own in zip(requests, samples, strict=True):
            offers = self._offers.pop(run, {})
            for i, (row, place) in enumerate(zip(rows, places_of(run), strict=True)):
                if place in offers:
                    own[i] = self._by_rejection(run, place[1], logits[row], offers[place], own[i])
        return samples

    @staticmethod
    def _by_rejection(
        run: BranchSequence, depth: int, logits: Tensor, offer: CandidateOffer, own: SampledToken
    ) -> SampledToken:
        """The token after ``depth`` draft tokens, from logits (vocab,); ``own`` has the entropy."""
        sampling = run.call.sampling
        p = distribution(logits.numpy(), sampling.temperature, sampling.top_p)
        token = choose(p, offer, run.branch.seed, run.position + depth)
        return token, float(logits.double().log_softmax(-1)[token]), own[2]


def places_of(run: BranchSequence) -> list[tuple[DraftBranch | None, int]]:
    """The way and the depth of each row of the pass that verifies a branch's draft."""
    chain = [(None, depth) for depth in range(1 + run.proposed)]
    return [
        *chain,
        *((fork, fork.at + 1 + i) for fork in run.forks for i in range(len(fork.tokens))),
    ]


def rejecting_scheduler(
    options: EngineOptions, target: Forwards, config: ModelConfig, clock: Callable[[], float]
) -> Scheduler:
    """A scheduler that accepts its drafts by rejection. Candidates are each branch's own, so none
    shares another's sequence."""
    text = Text(options.policy)
    speculation = load_speculative_decoder(options, text, clock, RejectionDraftModel)
    assert speculation is not None, "nothing drafts"
    drafter = speculation.drafter
    assert isinstance(drafter, RejectionDraftModel)
    return Scheduler(
        target,
        text,
        context=text.context,
        vocab=config.vocab,
        kv_tokens=options.kv_tokens,
        batch_limit=options.batch_limit,
        flops=config.flops,
        kv_policy=options.kv_policy,
        speculation=speculation,
        dedup=False,
        draw=drafter.sample,
    )
