"""Speculative sampling by rejection (Leviathan et al., with several candidates: MCSD, Yang et al.).

Candidates are drawn from the draft's distribution without replacement. Each is accepted with
probability min(1, p(x) / q(x)); after a rejection p becomes its excess over q, and q loses the
candidate. The tokens have exactly the target's distribution, but which one is drawn depends on the
draft, and on where there was one: the digest promise does not hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hedgerow_sglang.noise import gumbel, hashes
from runtime.embedded.batch import Forwards
from runtime.embedded.branch_sampling import SampleRequest, sample_requests
from runtime.embedded.draft_model import DraftModel, DraftTip
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import nucleus
from runtime.embedded.scheduler import Scheduler, scheduler_for
from runtime.embedded.sequence import BranchSequence, DraftChain, SampledToken
from runtime.embedded.speculative_decoding import load_speculative_decoder
from runtime.text import Text

Floats = NDArray[np.float64]

CANDIDATES, TRIAL, REST = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
"""Turn a branch's seed into the seeds of the candidates, of the trials and of the last draw."""


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
    ids = nucleus(tempered, top_p) if top_p < 1.0 else np.arange(len(logits))
    weight[ids] = np.exp(tempered[ids] - tempered.max())
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
    uniform = hashes(np.array([seed ^ TRIAL], np.uint64), [position], len(chances))[0] / 2.0**32
    for token, chance, draw in zip(offer.candidates, chances, uniform, strict=False):
        if draw < chance:
            return token
    noise = gumbel(np.array([seed ^ REST], np.uint64), [position], len(rest))[0]
    with np.errstate(divide="ignore"):
        return int((np.log(rest) + noise).argmax())


Offers = dict[tuple[DraftChain | None, int], CandidateOffer]
"""Offers by the chain of a draft tree and the depth on it."""


class RejectionDraftModel(DraftModel):
    """Draft tokens are sampled by a noise of their own, and kept with what they were drawn from
    until the target's pass has accepted or rejected them."""

    noise = CANDIDATES

    def __init__(self, *forward: Any, **options: Any) -> None:
        super().__init__(*forward, **options)
        self._offers = defaultdict[BranchSequence, Offers](dict)

    def end(self, seq: BranchSequence, *, publish: bool) -> None:
        self._offers.pop(seq, None)
        super().end(seq, publish=publish)

    def rank(self, tips: Sequence[DraftTip], logits: Tensor) -> list[list[int]]:
        ranked = super().rank(tips, logits)
        for (builder, chain), tokens, row in zip(tips, ranked, logits.numpy(), strict=True):
            sampling = builder.seq.call.sampling
            q = distribution(row, sampling.temperature, sampling.top_p)
            candidates = tuple(token for token in tokens[: builder.width(chain)] if token >= 0)
            self._offers[builder.seq][chain, builder.depth(chain)] = CandidateOffer(candidates, q)
        return ranked

    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[list[SampledToken]]:
        """``sample_requests``, but by rejection where a token was offered."""
        samples = sample_requests(logits, requests)
        for (seq, _, rows), tokens in zip(requests, samples, strict=True):
            offers = self._offers.pop(seq, {})
            for i, (row, place) in enumerate(zip(rows, places_of(seq), strict=True)):
                if place in offers:
                    tokens[i] = self._by_rejection(
                        seq, place[1], logits[row], offers[place], tokens[i]
                    )
        return samples

    @staticmethod
    def _by_rejection(
        seq: BranchSequence, depth: int, logits: Tensor, offer: CandidateOffer, plain: SampledToken
    ) -> SampledToken:
        """The token after ``depth`` draft tokens, from logits (vocab,); entropy as in ``plain``."""
        sampling = seq.call.sampling
        p = distribution(logits.numpy(), sampling.temperature, sampling.top_p)
        token = choose(p, offer, seq.branch.seed, seq.position + depth)
        return token, float(logits.double().log_softmax(-1)[token]), plain[2]


def places_of(seq: BranchSequence) -> list[tuple[DraftChain | None, int]]:
    """The chain and the depth of each row of the pass that verifies a branch's draft."""
    places: list[tuple[DraftChain | None, int]] = [(None, i) for i in range(1 + seq.draft_count)]
    for child in seq.children:
        places += [(child, depth) for depth in range(child.at + 1, child.depth + 1)]
    return places


def rejecting_scheduler(
    options: EngineOptions, target: Forwards, config: ModelConfig, clock: Callable[[], float]
) -> Scheduler:
    """A scheduler that accepts its drafts by rejection. Candidates are each branch's own, so none
    shares another's sequence."""
    text = Text(options.policy)
    options = replace(options, speculate=False, dedup=False)
    speculation = load_speculative_decoder(options, text, clock, RejectionDraftModel)
    assert speculation is not None, "nothing drafts"
    draft_model = speculation.draft_model
    assert isinstance(draft_model, RejectionDraftModel)
    return scheduler_for(options, target, config, clock, speculation, draft_model.sample)
