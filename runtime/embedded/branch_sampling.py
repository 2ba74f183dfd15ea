"""Samples tokens for branches: drafts are verified, and what several branches have in common is
computed once.

Siblings, and children of equal steps, begin with one prefix. While they sample the same their
tokens are one path: one of them has a sequence, the others follow it, and each samples by its own
noise from the one row of logits, whose bits are those that it would have had alone. Where they
diverge, each goes on with a sequence of its own, which reads what was computed before.

A draft is for the branch that has the sequence. Its followers share what it accepts, as far as
their own samples are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.sampler import DrawToken, sample, top_logprobs
from runtime.embedded.sequence import BranchSequence, DraftTree, SampledToken, SharedPrefix
from search.counters import Counters
from search.tree import Finish

SampleRequest = tuple[BranchSequence, Sequence[Sequence[int]], Sequence[int]]
"""A branch, the draft tokens that stand before each of its samples, and the rows of these."""

SampleFunction = Callable[[Tensor, Sequence[SampleRequest]], list[list[SampledToken]]]
"""``sample_requests`` or another rule: each request's samples, from logits (rows, vocab)."""

FinishFunction = Callable[[BranchSequence], Finish | None]
"""Why a branch's step ends with its last token; None if it goes on."""


def sample_requests(logits: Tensor, requests: Sequence[SampleRequest]) -> list[list[SampledToken]]:
    """The tokens of each branch from its rows of ``logits`` (rows, vocab), which may be shared."""
    if not requests:
        return []
    each = [(seq, drafted) for seq, before, _ in requests for drafted in before]
    samples = sample(
        logits,
        np.array([seq.branch.seed for seq, _ in each], dtype=np.uint64),
        np.array([seq.position + len(drafted) for seq, drafted in each], dtype=np.int64),
        np.array([seq.call.sampling.temperature for seq, _ in each]),
        np.array([seq.call.sampling.top_p for seq, _ in each]),
        np.array([row for *_, rows in requests for row in rows], dtype=np.int64),
        {i: draw for i, one in enumerate(each) if (draw := processed_draw(*one)) is not None},
    )
    tokens = zip(*(part.tolist() for part in samples), strict=True)
    samples_of = [list(islice(tokens, len(before))) for _, before, _ in requests]
    for (seq, _, rows), own in zip(requests, samples_of, strict=True):
        if (most := seq.call.sampling.logprobs) is not None:
            pairs = zip(rows, own, strict=True)
            own[:] = [
                (*token, top_logprobs(logits[row].numpy(), token, most)) for row, token in pairs
            ]
    return samples_of


def processed_draw(seq: BranchSequence, drafted: Sequence[int]) -> DrawToken | None:
    """What draws a branch's next token from its row, where its sampling changes logits."""
    if seq.call.processors is None:
        return None
    return partial(seq.call.processors.draw, seq.path(drafted), seq.branch.seed)


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """What a pass gave a branch: the ``tokens`` sampled, each from one of the pass's ``rows``, why
    the step ended with the last one (None: it goes on), the ``draft`` there was, how many samples
    had draft tokens to compare with (``tested``) and how many of those were among them."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    finish: Finish | None
    draft: DraftTree
    tested: int
    accepted: int

    def count(self, counters: Counters) -> None:
        """Add it to what a search has come to."""
        counters.decoded_tokens += len(self.tokens)
        counters.drafted_tokens += self.draft.count
        counters.tested_tokens += self.tested
        counters.accepted_tokens += self.accepted


def verify(
    seq: BranchSequence, samples: Sequence[SampledToken], finish_of: FinishFunction
) -> VerifiedTokens:
    """Give a branch its samples, as far as each equals a draft token and the step goes on.

    ``samples``: one for each row of its draft, in their order.
    """
    draft, tested, accepted = seq.detach_draft(), 0, 0
    rows: list[int] = []
    chain, depth = None, 0
    while True:
        rows.append(draft.row(chain, depth))
        token = seq.decode(samples[rows[-1]])
        candidates = dict(draft.at(chain, depth))
        tested += bool(candidates)
        accepted += token in candidates
        finish = finish_of(seq)
        if finish is not None or token not in candidates:
            break
        chain = candidates[token]
        seq.accept(token, chain, depth)
        depth += 1
    if finish is None:
        seq.append(token)
    tokens = tuple(seq.output[-len(rows) :])
    return VerifiedTokens(tokens, tuple(rows), finish, draft, tested, accepted)


DedupKey = tuple[SharedPrefix, tuple[int, ...]]


def dedup_key(seq: BranchSequence) -> DedupKey:
    """What branches have in common that may share a sequence."""
    return seq.prefix, tuple(seq.output)


def with_followers(seq: BranchSequence) -> tuple[BranchSequence, ...]:
    """The branch that has the sequence, and those that follow it."""
    return seq, *seq.followers


@dataclass(frozen=True, slots=True)
class FollowerTokens:
    """What a pass gave those that followed a sequence: who has ended and why, and of the others, by
    their new tokens, those that go on together. ``counts`` and ``matching``: of each, how many
    tokens it sampled and how many of these are the sequence's."""

    ended: list[tuple[BranchSequence, Finish]] = field(default_factory=list)
    groups: dict[tuple[int, ...], list[BranchSequence]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    matching: list[int] = field(default_factory=list)

    def diverged(self, tokens: Sequence[int]) -> bool:
        """Whether one of them sampled less than, or other than, these ``tokens``."""
        return any(count < len(tokens) for count in self.matching)


def sample_together(
    sample_rows: SampleFunction,
    passed: Sequence[tuple[BranchSequence, Tensor]],
    finish_of: FinishFunction,
) -> list[tuple[BranchSequence, VerifiedTokens, FollowerTokens]]:
    """Give each branch that has a sequence its next tokens, and those that follow it theirs.

    ``passed``: the branches, each with its logits (1 + draft tokens, vocab) in the draft's order.
    Followers are sampled for by the first row, and by further ones as far as they agree.
    """
    if not passed:
        return []
    requests: list[SampleRequest] = []
    starts: list[int] = []
    count = 0
    for seq, logits in passed:
        requests.append((seq, seq.drafted_before(), range(count, count + len(logits))))
        requests += [(follower, [()], [count]) for follower in seq.followers]
        starts.append(count)
        count += len(logits)
    logits = torch.cat([rows for _, rows in passed])
    samples = iter(sample_rows(logits, requests))
    together: list[tuple[BranchSequence, VerifiedTokens, list[list[SampledToken]]]] = []
    further: list[SampleRequest] = []
    further_rows: list[int] = []
    agreeing: list[list[SampledToken]] = []
    for (seq, _), start in zip(passed, starts, strict=True):
        verified = verify(seq, next(samples), finish_of)
        follower_samples = [next(samples) for _ in seq.followers]
        together.append((seq, verified, follower_samples))
        pairs = zip(seq.followers, follower_samples, strict=True)
        agree = [(one, own) for one, own in pairs if own[0][0] == verified.tokens[0]]
        before = [verified.tokens[:depth] for depth in range(1, len(verified.rows))]
        if agree and before:
            rows = range(len(further_rows), len(further_rows) + len(before))
            further_rows += [start + row for row in verified.rows[1:]]
            further += [(one, before, rows) for one, _ in agree]
            agreeing += [own for _, own in agree]
    for own, more in zip(agreeing, sample_rows(logits[further_rows], further), strict=True):
        own += more
    results = []
    for seq, verified, follower_samples in together:
        followers, seq.followers = seq.followers, []
        followed = sample_followers(followers, follower_samples, verified.tokens, finish_of)
        results.append((seq, verified, followed))
    return results


def sample_followers(
    followers: Iterable[BranchSequence],
    samples: Sequence[Sequence[SampledToken]],
    tokens: Sequence[int],
    finish_of: FinishFunction,
) -> FollowerTokens:
    """Give each branch its samples, as far as they are ``tokens``, those of the one it follows, and
    the first that is another. ``samples``: of each all, or the first alone if that is another."""
    result = FollowerTokens()
    for seq, own in zip(followers, samples, strict=True):
        count, finish = 0, None
        for sampled, expected in zip(own, tokens, strict=False):
            token = seq.decode(sampled)
            count += 1
            finish = finish_of(seq)
            if finish is not None or token != expected:
                break
        result.counts.append(count)
        result.matching.append(count - (seq.output[-1] != tokens[count - 1]))
        if finish is None:
            result.groups.setdefault(tuple(seq.output[-count:]), []).append(seq)
        else:
            result.ended.append((seq, finish))
    return result
