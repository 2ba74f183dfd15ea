"""Sample tokens for branches: verify drafts, and compute once what several branches share.

Siblings, and children of equal steps, begin with one prefix. While they sample the same tokens, one
of them has a sequence and the others follow it: each samples by its own noise from the same row of
logits, which has the bits that it would have had for each branch alone. Where they diverge, each
goes on with a sequence of its own, which reads what was computed before.

A draft is made for the branch that has the sequence. Its followers share what it accepts, as far as
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
"""A branch, the draft tokens before each of its samples, and the row of logits for each sample."""

SampleFunction = Callable[[Tensor, Sequence[SampleRequest]], list[list[SampledToken]]]
"""Returns each request's samples, from logits (rows, vocab), as ``sample_requests`` does."""

FinishFunction = Callable[[BranchSequence], Finish | None]
"""Returns why a branch's step ends with its last token; None if it goes on."""


def sample_requests(logits: Tensor, requests: Sequence[SampleRequest]) -> list[list[SampledToken]]:
    """Sample each request from its rows of ``logits`` (rows, vocab), which requests may share."""
    if not requests:
        return []
    draws = [(seq, drafted) for seq, before, _ in requests for drafted in before]
    samples = sample(
        logits,
        np.array([seq.branch.seed for seq, _ in draws], dtype=np.uint64),
        np.array([seq.position + len(drafted) for seq, drafted in draws], dtype=np.int64),
        np.array([seq.call.sampling.temperature for seq, _ in draws]),
        np.array([seq.call.sampling.top_p for seq, _ in draws]),
        np.array([row for *_, rows in requests for row in rows], dtype=np.int64),
        {i: rule for i, draw in enumerate(draws) if (rule := processed_draw(*draw)) is not None},
    )
    tokens = zip(*(part.tolist() for part in samples), strict=True)
    samples_of = [list(islice(tokens, len(before))) for _, before, _ in requests]
    for (seq, _, rows), branch_samples in zip(requests, samples_of, strict=True):
        if (count := seq.call.sampling.logprobs) is not None:
            pairs = zip(rows, branch_samples, strict=True)
            branch_samples[:] = [
                (*token, top_logprobs(logits[row].numpy(), token, count)) for row, token in pairs
            ]
    return samples_of


def processed_draw(seq: BranchSequence, drafted: Sequence[int]) -> DrawToken | None:
    """Draws a branch's next token from its row; None if its sampling does not change logits."""
    if seq.call.processors is None:
        return None
    return partial(seq.call.processors.draw, seq.path(drafted), seq.branch.seed)


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """What a pass gave a branch: the ``tokens`` sampled, each from one of the pass's ``rows``; why
    the step ended with the last one (None: it goes on); its ``draft``; how many samples had draft
    tokens to compare with (``tested``), and how many equalled one of those (``accepted``)."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    finish: Finish | None
    draft: DraftTree
    tested: int
    accepted: int

    def count(self, counters: Counters) -> None:
        """Add these tokens to a search's counters."""
        counters.decoded_tokens += len(self.tokens)
        counters.drafted_tokens += self.draft.count
        counters.tested_tokens += self.tested
        counters.accepted_tokens += self.accepted


def verify(
    seq: BranchSequence, samples: Sequence[SampledToken], finish_of: FinishFunction
) -> VerifiedTokens:
    """Add samples to a branch up to the first that equals no draft token or ends the step.

    ``samples``: one for each row of its draft, in row order.
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
    """A key that is equal for branches that may share a sequence."""
    return seq.prefix, tuple(seq.output)


def with_followers(seq: BranchSequence) -> tuple[BranchSequence, ...]:
    """A branch with a sequence, and the branches that follow it."""
    return seq, *seq.followers


@dataclass(frozen=True, slots=True)
class FollowerTokens:
    """What a pass gave the followers of a sequence: ``ended``, those whose step ended, and why;
    ``groups``, the others by their new tokens, which go on together. ``counts`` and ``matching``:
    for each follower, how many tokens it sampled and how many of those are the sequence's."""

    ended: list[tuple[BranchSequence, Finish]] = field(default_factory=list)
    groups: dict[tuple[int, ...], list[BranchSequence]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    matching: list[int] = field(default_factory=list)

    def diverged(self, tokens: Sequence[int]) -> bool:
        """Whether a follower sampled fewer tokens than ``tokens``, or other ones."""
        return any(count < len(tokens) for count in self.matching)


def sample_together(
    sample_rows: SampleFunction,
    branch_logits: Sequence[tuple[BranchSequence, Tensor]],
    finish_of: FinishFunction,
) -> list[tuple[BranchSequence, VerifiedTokens, FollowerTokens]]:
    """Sample the next tokens of each branch that has a sequence, and of its followers.

    ``branch_logits``: the branches, each with its logits (1 + draft tokens, vocab) in row order.
    Followers sample from the first row, and from the next ones as far as their samples agree.
    """
    if not branch_logits:
        return []
    requests: list[SampleRequest] = []
    starts: list[int] = []
    count = 0
    for seq, logits in branch_logits:
        requests.append((seq, seq.drafted_before(), range(count, count + len(logits))))
        requests += [(follower, [()], [count]) for follower in seq.followers]
        starts.append(count)
        count += len(logits)
    logits = torch.cat([rows for _, rows in branch_logits])
    samples = iter(sample_rows(logits, requests))
    verifications: list[tuple[BranchSequence, VerifiedTokens, list[list[SampledToken]]]] = []
    later_requests: list[SampleRequest] = []
    later_rows: list[int] = []
    agreeing_samples: list[list[SampledToken]] = []
    for (seq, _), start in zip(branch_logits, starts, strict=True):
        verified = verify(seq, next(samples), finish_of)
        follower_samples = [next(samples) for _ in seq.followers]
        verifications.append((seq, verified, follower_samples))
        pairs = zip(seq.followers, follower_samples, strict=True)
        agreeing = [pair for pair in pairs if pair[1][0][0] == verified.tokens[0]]
        before = [verified.tokens[:depth] for depth in range(1, len(verified.rows))]
        if agreeing and before:
            rows = range(len(later_rows), len(later_rows) + len(before))
            later_rows += [start + row for row in verified.rows[1:]]
            later_requests += [(follower, before, rows) for follower, _ in agreeing]
            agreeing_samples += [own_samples for _, own_samples in agreeing]
    later_samples = sample_rows(logits[later_rows], later_requests)
    for own_samples, more_samples in zip(agreeing_samples, later_samples, strict=True):
        own_samples += more_samples
    outcomes = []
    for seq, verified, follower_samples in verifications:
        followers, seq.followers = seq.followers, []
        follower_tokens = sample_followers(followers, follower_samples, verified.tokens, finish_of)
        outcomes.append((seq, verified, follower_tokens))
    return outcomes


def sample_followers(
    followers: Iterable[BranchSequence],
    samples: Sequence[Sequence[SampledToken]],
    tokens: Sequence[int],
    finish_of: FinishFunction,
) -> FollowerTokens:
    """Add samples to each follower up to the first that differs from ``tokens``, the tokens of the
    branch that it follows. ``samples``: each follower's, or only its first if that one differs."""
    follower_tokens = FollowerTokens()
    for seq, branch_samples in zip(followers, samples, strict=True):
        count, finish = 0, None
        for sampled, expected in zip(branch_samples, tokens, strict=False):
            token = seq.decode(sampled)
            count += 1
            finish = finish_of(seq)
            if finish is not None or token != expected:
                break
        follower_tokens.counts.append(count)
        follower_tokens.matching.append(count - (seq.output[-1] != tokens[count - 1]))
        if finish is None:
            follower_tokens.groups.setdefault(tuple(seq.output[-count:]), []).append(seq)
        else:
            follower_tokens.ended.append((seq, finish))
    return follower_tokens
