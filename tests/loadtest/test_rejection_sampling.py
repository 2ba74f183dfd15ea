"""Rejection sampling draws from the target's distribution: enumerated, and by chi-square."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np
import pytest
from scipy.stats import chisquare

from loadtest.rejection_sampling import (
    CANDIDATES,
    CandidateOffer,
    choose,
    distribution,
    rejecting_scheduler,
    trials,
)
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import rank_candidates
from runtime.text import Text
from search.engine import Branch, Sampling
from search.tree import ROOT, node_seed
from tests.runtime.scheduler_support import finish

SPRIG = "models/sprig"
VOCAB = 4


def orders(q: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of ``count`` draws from q without replacement, with its probability."""
    for order in permutations(np.flatnonzero(q).tolist(), min(count, int(np.count_nonzero(q)))):
        remaining, chance = q.copy(), 1.0
        for token in order:
            chance *= q[token] / remaining.sum()
            remaining[token] = 0.0
        yield order, chance


def outcome(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """The distribution (vocab,) of the chosen token over all offers of ``count`` candidates."""
    total = np.zeros(len(p))
    for candidates, likely in orders(q, count):
        chances, rest = trials(p, CandidateOffer(candidates, q))
        reached = likely
        for token, chance in zip(candidates, chances, strict=False):
            total[token] += reached * chance
            reached *= 1 - chance
        total += reached * rest
    return total


def some(seed: int, temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """A random distribution over the tiny vocabulary."""
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 1.5
    return distribution(logits, temperature, top_p)


@pytest.mark.promise(
    "Rejection sampling (`leviathan`) draws tokens from the policy's distribution, whatever the "
    "draft model proposes."
)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.2, 1.0), (1.0, 0.7), (0.0, 1.0)])
def test_the_first_two_tokens_by_enumeration(count: int, temperature: float, top_p: float) -> None:
    """Over every order of candidates for the first and the second token, with any draft, each pair
    of tokens has the target's probability."""
    for seed in range(5):
        first = some(seed, temperature, top_p)
        marginal = outcome(first, some(seed + 100, temperature, top_p), count)
        for a, b in product(range(VOCAB), repeat=2):
            second = some(1000 * seed + a, temperature, top_p)
            draft = some(1000 * seed + a + 500, temperature, top_p)
            pair = marginal[a] * outcome(second, draft, count)[b]
            assert pair == pytest.approx(first[a] * second[b], abs=1e-9)


def test_one_candidate_is_the_paper_s_rule() -> None:
    """p = (.5, .5), q = (.9, .1): token 0 is accepted with 5/9, else token 1 is drawn."""
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    chances, rest = trials(p, CandidateOffer((0,), q))
    assert chances == [pytest.approx(5 / 9)]
    assert rest.tolist() == [0.0, 1.0]
    assert trials(p, CandidateOffer((1,), q))[0] == [1.0]


def test_the_noise_is_fair() -> None:
    """The tokens chosen on 2000 branches with two candidates each fit the target."""
    p, q = some(1), some(2)
    counts = Counter[int]()
    rng = np.random.default_rng(0)
    for seed in range(2000):
        candidates = tuple(rng.choice(VOCAB, 2, replace=False, p=q).tolist())
        counts[choose(p, CandidateOffer(candidates, q), node_seed(seed, "fair", (0,)), 17)] += 1
    assert chisquare([counts[v] for v in range(VOCAB)], 2000 * p).pvalue > 0.001


PROMPT = "Use 4 9 10 13 to make 24."


def fits(tokens: Sequence[int], expected: np.ndarray) -> bool:
    """Whether tokens fit probabilities (vocab,), by chi-square; rare tokens are pooled."""
    counts, means = np.bincount(tokens, minlength=len(expected)), len(tokens) * expected
    often = means >= 5
    observed = [*counts[often], counts[~often].sum()]
    return chisquare(observed, [*means[often], means[~often].sum()]).pvalue > 1e-4


def logits_after(model: str, path: Sequence[int]) -> np.ndarray:
    """A bundled model's logits (vocab,) after the tokens ``path``."""
    forward = Forward(f"{SPRIG}/{model}", threads=1)
    span = Span(np.array(path), 0, np.arange(len(path)), len(path) - 1)
    return forward.run([span], forward.new_store(len(path)))[0].numpy()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_twenty_thousand_samples_fit_the_policy(count: int) -> None:
    """20,000 branches of the bundled pair at a prompt fit the policy by chi-square."""
    prompt = Text(f"{SPRIG}/policy").encode_chat([{"role": "user", "content": PROMPT}])
    logits = logits_after("draft", prompt)
    p = distribution(logits_after("policy", prompt), 1.0, 1.0)
    q = distribution(logits, 1.0, 1.0)
    seeds = [node_seed(5, "chi", (i,)) for i in range(20_000)]
    tokens = []
    for first in range(0, len(seeds), 500):
        some_seeds = seeds[first : first + 500]
        rows, ones = np.repeat(logits[None], len(some_seeds), 0), np.ones(len(some_seeds))
        at = [len(prompt)] * len(some_seeds)
        noise = np.array([seed ^ CANDIDATES for seed in some_seeds], dtype=np.uint64)
        offers = rank_candidates(rows, noise, at, ones, ones, count)
        for seed, candidates in zip(some_seeds, offers.tolist(), strict=True):
            tokens.append(choose(p, CandidateOffer(tuple(candidates), q), seed, len(prompt)))
    assert fits(tokens, p)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("k_config", [(1, 1, 1), (2, 2, 1)])
def test_branches_drawn_by_rejection_fit_the_policy(k_config: tuple[int, ...]) -> None:
    """A thousand branches of four tokens go through the scheduler: the tokens after the commonest
    beginning of each length fit the policy."""
    options = EngineOptions(
        f"{SPRIG}/policy",
        draft="scheduled",
        draft_model=f"{SPRIG}/draft",
        draft_tokens=len(k_config),
        k_config=k_config,
        threads=1,
        kv_tokens=8000,
        batch_limit=250,
    )
    text, forward = Text(options.policy), Forward(options.policy, threads=1)
    prompt = tuple(text.encode_chat([{"role": "user", "content": PROMPT}]))
    engine = rejecting_scheduler(options, forward, forward.config, time.perf_counter)
    sampling = Sampling(temperature=1.0, max_step_tokens=4)
    seeds = [node_seed(5, "through", (i,)) for i in range(1000)]
    branches = [Branch(ROOT, i, prompt, seed, 4, i + 1) for i, seed in enumerate(seeds)]
    engine.expand(1, "oak", branches, sampling)
    paths = [step.tokens for step in finish(engine)[1]]
    engine.check()
    totals = engine.totals()
    assert totals.accepted_tokens > 0.5 * totals.tested_tokens > 500
    for depth in range(4):
        longer = [path for path in paths if len(path) > depth]
        common = Counter(path[:depth] for path in longer).most_common(1)[0][0]
        after = [path[depth] for path in longer if path[:depth] == common]
        expected = distribution(logits_after("policy", [*prompt, *common]), 1.0, 1.0)
        assert fits(after, expected)
