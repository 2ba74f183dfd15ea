"""Rejection sampling draws from the target's distribution: enumerated, and by chi-square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from runtime.embedded.draft import load_speculation
from runtime.embedded.forward import Forward, Span
from runtime.embedded.leviathan import Offer, choose, distribution, trials
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import draw
from runtime.embedded.scheduler import Scheduler
from runtime.text import Text
from search.engine import Branch, Sampling
from search.seed import node_seed
from search.tree import ROOT
from tests.runtime.test_scheduler import finish

SPRIG = "models/sprig"
VOCAB = 4


def orders(q: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """What can be drawn from q without replacement, each with its probability."""
    for drawn in permutations(np.flatnonzero(q).tolist(), min(count, int(np.count_nonzero(q)))):
        left, chance = q.copy(), 1.0
        for token in drawn:
            chance *= q[token] / left.sum()
            left[token] = 0.0
        yield drawn, chance


def outcome(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """The distribution of the token that comes out, over all that the draft may offer."""
    total = np.zeros(len(p))
    for candidates, likely in orders(q, count):
        chances, rest = trials(p, Offer(candidates, q))
        reached = likely
        for token, chance in zip(candidates, chances, strict=False):
            total[token] += reached * chance
            reached *= 1 - chance
        total += reached * rest
    return total


def some(seed: int, temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """A distribution over the tiny vocabulary."""
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 1.5
    return distribution(logits, temperature, top_p)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.2, 1.0), (1.0, 0.7), (0.0, 1.0)])
def test_the_first_two_tokens_by_enumeration(count: int, temperature: float, top_p: float) -> None:
    """Every order of candidates for the first and for the second token, whatever the draft thinks:
    the pair has the target's probability."""
    for seed in range(5):
        first = some(seed, temperature, top_p)
        came = outcome(first, some(seed + 100, temperature, top_p), count)
        for a, b in product(range(VOCAB), repeat=2):
            second = some(1000 * seed + a, temperature, top_p)
            draft = some(1000 * seed + a + 500, temperature, top_p)
            pair = came[a] * outcome(second, draft, count)[b]
            assert pair == pytest.approx(first[a] * second[b], abs=1e-9)


def test_one_candidate_is_the_paper_s_rule() -> None:
    """p = (.5, .5), q = (.9, .1): a first token is accepted with 5/9, else the second comes."""
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    chances, rest = trials(p, Offer((0,), q))
    assert chances == [pytest.approx(5 / 9)]
    assert rest.tolist() == [0.0, 1.0]
    assert trials(p, Offer((1,), q))[0] == [1.0]


def test_the_noise_is_fair() -> None:
    """Two thousand branches with two candidates each: the chosen tokens fit the target."""
    p, q = some(1), some(2)
    came = Counter[int]()
    rng = np.random.default_rng(0)
    for seed in range(2000):
        candidates = tuple(rng.choice(VOCAB, 2, replace=False, p=q).tolist())
        came[choose(p, Offer(candidates, q), node_seed(seed, "fair", (0,)), 17)] += 1
    assert chisquare([came[v] for v in range(VOCAB)], 2000 * p).pvalue > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("k_config", [(1, 1, 1), (2, 1, 1), (2, 2, 1)])
def test_twenty_thousand_samples_fit_the_policy(k_config: tuple[int, ...]) -> None:
    """The bundled pair, 20,000 branches of three tokens from one prompt: the second token, which
    is the first that a draft foresees, and the third fit the policy's own distribution."""
    options = EngineOptions(
        f"{SPRIG}/policy",
        draft="scheduled",
        draft_model=f"{SPRIG}/draft",
        draft_rule="leviathan",
        draft_tokens=len(k_config),
        k_config=k_config,
        threads=1,
    )
    text, forward = Text(options.policy), Forward(options.policy, threads=1)
    prompt = tuple(text.encode_chat([{"role": "user", "content": "Use 4 9 10 13 to make 24."}]))
    engine = Scheduler(
        forward,
        draw,
        text,
        context=text.context,
        vocab=forward.config.vocab,
        kv_tokens=8000,
        batch_limit=256,
        flops=forward.config.flops,
        speculation=load_speculation(options, text),
    )
    sampling = Sampling(temperature=1.0, max_step_tokens=3)
    branches = [Branch(ROOT, i, prompt, node_seed(5, "chi", (i,)), 3, i + 1) for i in range(20_000)]
    engine.expand(1, "oak", branches, sampling)
    paths = [step.tokens for step in finish(engine)[1]]
    totals = engine.totals()
    assert totals.accepted_tokens > 0.5 * totals.tested_tokens > 10_000
    for depth in (0, 1, 2):
        (common, _), *_ = Counter(path[:depth] for path in paths if len(path) > depth).most_common(
            1
        )
        after = [path[depth] for path in paths if path[:depth] == common and len(path) > depth]
        path = np.array([*prompt, *common])
        store = forward.new_store(len(path))
        logits = forward.run([Span(path, 0, np.arange(len(path)), len(path) - 1)], store)
        expected = len(after) * torch.softmax(logits[0].double(), -1).numpy()
        seen = np.bincount(after, minlength=len(expected))
        often = expected >= 5
        counts = [*seen[often], seen[~often].sum()]
        assert chisquare(counts, [*expected[often], expected[~often].sum()]).pvalue > 1e-4
