"""Sampling: by hand, by frequency, and independent of other rows."""

import math

import numpy as np
import pytest
import torch

from hedgerow_sglang.noise import gumbel
from runtime.embedded.sampler import nucleus, rank_candidates, sample

HALVES = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float32))


@pytest.mark.promise(
    "A sampled token is the argmax of log-probability plus noise that is a hash of seed, position "
    "and token."
)
def test_token_is_the_argmax_of_logprob_plus_noise():
    """Temperature 1 adds the noise to the log-probabilities; 2 halves them first."""
    for temperature in (1.0, 2.0):
        for seed in range(50):
            expected = (HALVES[0] / temperature + gumbel([seed], [3], 4)[0]).argmax()
            assert sample(HALVES, [seed], [3], temperature).tokens[0] == expected


def test_logprob_and_entropy_by_hand():
    """Both are of the distribution before temperature: 1/2 1/4 1/8 1/8 has 1.75 bits of entropy."""
    draws = sample(HALVES, [1], [0], temperature=0.3, top_p=0.6)
    assert draws.entropies[0] == pytest.approx(1.75 * math.log(2), abs=1e-7)
    assert draws.logprobs[0] == pytest.approx(HALVES[0, draws.tokens[0]], abs=1e-7)


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, allowed):
    """1/2 1/4 1/8 1/8: the kept set grows as top_p passes the running sums; ties go by id."""
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float64)).astype(np.float32)
    tokens = sample(np.repeat(logits, 400, 0), range(400), [0] * 400, top_p=top_p).tokens
    assert set(tokens.tolist()) == allowed


@pytest.mark.promise(
    "Top-p sampling draws the token of plain sampling if it is in the nucleus; coupled draft "
    "acceptance rests on this."
)
def test_top_p_draws_what_plain_sampling_would_draw_inside_the_nucleus():
    """The column of the noise is the token id: truncation never renumbers it."""
    logits = np.repeat(HALVES, 200, 0)
    plain = sample(logits, range(200), [5] * 200).tokens
    cut = sample(logits, range(200), [5] * 200, top_p=0.7).tokens
    inside = plain <= 1
    assert 100 < inside.sum() < 190
    assert np.array_equal(plain[inside], cut[inside])


def test_broken_logits_are_an_error():
    """Logits that are not finite raise FloatingPointError, naming the row."""
    with pytest.raises(FloatingPointError, match="row 1"):
        sample(np.array([[0.0, 1.0], [0.0, np.nan]], dtype=np.float32), [0, 0], [0, 0])


def by_definition(logits, seed, position, temperature, top_p):
    """The ids within top-p, best score with noise first, computed over all tokens."""
    x = logits.astype(np.float64)
    x -= x.max()
    scores = (x - np.log(np.exp(x).sum())) / temperature
    weight = np.exp(scores - scores.max())
    falling = np.argsort(-weight, kind="stable")
    before = np.cumsum(weight[falling]) - weight[falling]
    allowed = falling[before < top_p * weight.sum()] if top_p < 1 else falling
    noisy = scores + gumbel([seed], [position], len(logits))[0]
    return sorted(allowed.tolist(), key=lambda token: (-noisy[token], token))


@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
def test_a_real_vocabulary_is_drawn_by_the_definition(spread):
    """Draws and next candidates over 49,152 tokens, from nearly uniform to few likely ones, also
    after calls of other sizes."""
    generator = np.random.default_rng(3)
    logits = generator.normal(scale=spread, size=(7, 49_152)).astype(np.float32)
    heat = np.array([1.0, 0.7, 1.0, 0.7, 1.3, 1.0, 1.0])
    mass = np.array([1.0, 1.0, 0.9, 0.95, 0.5, 1e-9, 0.9999])
    seeds, positions = np.arange(7, dtype=np.uint64) << np.uint64(33), np.arange(7) * 100
    sample(HALVES, [1], [2], top_p=0.9)
    tokens = sample(logits, seeds, positions, heat, mass).tokens
    ranked = rank_candidates(logits, seeds, positions, heat, mass, 3)
    for i, candidates in enumerate(ranked):
        expected = by_definition(logits[i], int(seeds[i]), int(positions[i]), heat[i], mass[i])
        assert tokens[i] == expected[0]
        assert [t for t in candidates if t >= 0] == expected[:3]


def test_candidates_of_a_cold_row_are_the_likeliest():
    """At temperature 0 candidates go by logit, ties by id, and missing ones are -1."""
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 2.0]], dtype=np.float32)
    cold, whole = np.zeros(1), np.ones(1)
    assert rank_candidates(logits, [0], [0], cold, whole, 4).tolist() == [[1, 3, 2, 4]]
    assert rank_candidates(logits, [0], [0], cold, whole, 6).tolist() == [[1, 3, 2, 4, 0, -1]]


def test_a_nucleus_is_told_with_the_likeliest_first():
    """.5 and both of .2 are needed for .75; likeliest first, ties by id."""
    tempered = np.log(np.array([0.2, 0.1, 0.5, 0.2]))
    assert nucleus(tempered, 0.75).tolist() == [2, 0, 3]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows_and_change_nothing(threads):
    """Results have the same bits for any number of threads; a broken row is named by any thread."""
    logits = np.random.default_rng(5).normal(size=(17, 49_152)).astype(np.float32)
    seeds, mass = np.arange(17, dtype=np.uint64), np.where(np.arange(17) % 3, 1.0, 0.9)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        draws = sample(logits, seeds, range(17), 0.7, mass)
        alone = [sample(logits[i : i + 1], [i], [i], 0.7, mass[i]) for i in range(17)]
        for field, *rows in zip(draws, *alone, strict=True):
            assert field.tobytes() == b"".join(row.tobytes() for row in rows)
        logits[12, 3] = np.nan
        with pytest.raises(FloatingPointError, match="row 12"):
            sample(logits, seeds, range(17))
    finally:
        torch.set_num_threads(before)
