"""Draws from a shortlist of tokens equal draws from the whole vocabulary, to the last bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hedgerow_sglang.noise import gumbel
from runtime.embedded import shortlist as module
from runtime.embedded.sampler import sample
from runtime.embedded.shortlist import ROOM, Draws, Shortlist, shortlist, shortlist_samples
from tests.hedgerow_sglang.test_noise import MASK, position_for
from tests.runtime.kernels import KERNELS

built = pytest.mark.skipif("native" not in KERNELS, reason="no C compiler")

KINDS = {
    "as models have them": lambda dice, n: dice.normal(0, 3, n),
    "nearly certain": lambda dice, n: dice.normal(0, 2, n) + 40 * (np.arange(n) == n // 2),
    "flat": lambda dice, n: dice.normal(0, 0.01, n),
    "all equal": lambda dice, n: np.full(n, dice.normal()),
    "ties": lambda dice, n: dice.normal(0, 2, n).round(),
    "two heights": lambda dice, n: dice.choice([0.0, -150.0], n),
    "far apart": lambda dice, n: dice.normal(0, 1e30, n),
    "a few far above": lambda dice, n: dice.choice(
        [0.0, -200.0, -90.0, -1e4], n, p=[0.01] + 3 * [0.33]
    ),
    "what float64 cannot tell apart": lambda dice, n: np.where(
        dice.random(n) < 0.1, 1.0, dice.normal(0, 1e-17, n)
    ),
    "least numbers": lambda dice, n: dice.normal(0, 1e-42, n),
}
HEATS = [0.0, 5e-324, 1e-300, 1e-20, 1e-3, 0.02, 0.7, 1.0, 1.3, 30.0, 1e3, 1e4, 1e300]
MASSES = [1e-300, 1e-6, 0.3, 0.9, 0.95, 0.999999, 1 - 2**-53, 1.0]


def by_definition(
    logits: NDArray[np.float32], seed: int, position: int, heat: float, mass: float
) -> tuple[int, float, float]:
    """Token, log-probability and entropy, computed over all tokens."""
    x = logits.astype(np.float64)
    x -= x.max()
    weight = np.exp(x)
    total = weight.sum()
    logprobs = x - np.log(total)
    entropy = np.log(total) - (weight * x).sum() / total
    token = int(logits.argmax())
    if heat > 1e-290:
        with np.errstate(over="ignore"):
            scores = logprobs / heat
        weight = np.exp(scores - scores.max())
        falling = np.argsort(-weight, kind="stable")
        before = np.cumsum(weight[falling]) - weight[falling]
        in_nucleus = np.ones(len(x), bool)
        in_nucleus[falling] = (mass == 1) | (before < mass * weight.sum())
        noisy = scores + gumbel([seed], [position], len(x))[0]
        token = int(np.where(in_nucleus, noisy, -np.inf).argmax())
    return token, logprobs[token], entropy


@pytest.fixture(params=KERNELS, scope="module")
def _kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with the compiled library and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(module, "shortlist", lambda: None)
        yield


@pytest.mark.promise(
    "A draw from a shortlist of tokens equals the draw from the whole vocabulary, to the last bit."
)
@pytest.mark.usefixtures("_kernel")
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 15, 16, 17, 300, 1023, 1025, 5000]),
    st.lists(
        st.tuples(st.sampled_from([*KINDS]), st.sampled_from(HEATS), st.sampled_from(MASSES)),
        min_size=1,
        max_size=8,
    ),
)
@example(0, 5000, [("as models have them", 0.7, 0.95)] * 8)
@example(0, 5000, [("as models have them", 0.7, 0.2)] * 8)
@example(0, 5000, [("what float64 cannot tell apart", 1.0, mass) for mass in MASSES])
def test_draws_are_those_of_the_whole_vocabulary(
    case: int, vocab: int, specs: list[tuple[str, float, float]]
) -> None:
    """One call with rows of all kinds, some drawn twice, at all temperatures and top-p values."""
    dice = np.random.default_rng(case)
    with np.errstate(over="ignore"):
        logits = np.stack([KINDS[kind](dice, vocab) for kind, *_ in specs]).astype(np.float32)
    rows = np.append(np.arange(len(specs)), dice.integers(0, len(specs), 3))
    seeds = dice.integers(0, 2**64, len(rows), dtype=np.uint64)
    positions = dice.integers(0, 2**32, len(rows))
    heat, mass = (np.array([spec[i] for spec in specs])[rows] for i in (1, 2))
    draws = sample(logits, seeds, positions, heat, mass, rows)
    for i, row in enumerate(rows):
        expected = by_definition(
            logits[row], int(seeds[i]), int(positions[i]), float(heat[i]), float(mass[i])
        )
        assert tuple(field[i] for field in draws) == expected, specs[row]


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("hashed", [0, 1, MASK - 1, MASK])
@pytest.mark.parametrize("vocab", [1000, 3000])
@pytest.mark.parametrize("below", [0.0, 25.0, 150.0, 720.0])
def test_the_likeliest_has_the_extremes_of_noise(hashed: int, vocab: int, below: float) -> None:
    """With the least noise on the likeliest token, the token drawn may be so unlikely that its
    probability underflows in float32."""
    dice = np.random.default_rng(vocab)
    for seed in range(3):
        logits = dice.normal(-below, 20, vocab).astype(np.float32)
        logits[1:] = np.minimum(logits[1:], -below)
        logits[0] = 0
        position = position_for(hashed, seed)
        for mass in (1.0, 0.9):
            draws = sample(logits[None], [seed], [position], 1.0, mass)
            expected = by_definition(logits, seed, position, 1.0, mass)
            assert tuple(field[0] for field in draws) == expected


@pytest.mark.usefixtures("_kernel")
def test_one_of_many_unlikely_tokens_wins() -> None:
    """The likeliest token has the least possible noise, and the others' weights underflow."""
    for seed in range(20):
        logits, position = np.full(900, -200, np.float32), position_for(0, seed)
        logits[0], logits[800] = 0, -100
        assert sample(logits[None], [seed], [position]).tokens.tolist() == [800]


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("heat", [0.05, 0.7, 1.0, 20.0])
def test_the_nearest_of_two(heat: float) -> None:
    """With noise an unlikely token's score equals the likely one's but for the last bits of its
    logit."""
    for below in [*range(4), *range(10, 2000, 70)]:
        position = position_for(MASK - below, seed=below)
        first_noise, second_noise = gumbel([below], [position], 2)[0]
        logits = np.array([[heat * (second_noise - first_noise), 0]], np.float32)
        for towards in (-np.inf, 0):
            for _ in range(3):
                draws = sample(logits, [below], [position], heat)
                expected = by_definition(logits[0], below, position, heat, 1.0)
                assert draws.tokens[0] == expected[0]
                logits[0, 0] = np.nextafter(logits[0, 0], np.float32(towards))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("heat", [0.7, 1.0])
def test_the_last_of_a_nucleus(heat: float) -> None:
    """The overall winner is just inside or just outside the nucleus."""
    dice = np.random.default_rng(1)
    logits = dice.normal(0, 2, (60, 500)).astype(np.float32)
    for row, row_logits in enumerate(logits):
        first = by_definition(row_logits, row, row, heat, 1.0)[0]
        weight = np.exp((row_logits.astype(np.float64) - row_logits.max()) / heat)
        before = weight[row_logits > row_logits[first]].sum() / weight.sum()
        for off in (-1e-6, -1e-8, -2e-16, 0, 2e-16, 1e-8, 1e-6):
            mass = max(before * (1 + off), 1e-9)
            draws = sample(row_logits[None], [row], [row], heat, mass)
            assert draws.tokens[0] == by_definition(row_logits, row, row, heat, mass)[0]


@pytest.mark.parametrize("heat", [1e-308, 1e-100, 1e-17])
def test_the_coldest_draw_of_a_large_vocabulary(heat: float) -> None:
    """At such low temperatures noise does not matter, and the likeliest token is drawn."""
    logits = np.random.default_rng(0).normal(0, 3, (3, 70_000)).astype(np.float32)
    for mass in (0.9, 1.0):
        sampled = sample(logits, [1, 2, 3], [5, 5, 5], heat, mass)
        assert sampled.tokens.tolist() == logits.argmax(-1).tolist()


@built
@pytest.mark.parametrize("mass", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("heat", [0.7, 1.0])
def test_hardly_anything_is_left_untold(mass: float, heat: float) -> None:
    """For realistic logits the shortlist finds every draw; at very low temperatures none."""
    dice = np.random.default_rng(0)
    logits = dice.normal(0, 3, (40, 20_000)).astype(np.float32)
    each, most = np.arange(40), logits.max(-1).astype(np.float64)
    log_total = np.log(np.exp(logits - most[:, None]).sum(-1))
    seeds, full = each.astype(np.uint64), np.full(40, 1.0)
    draws = Draws(each, logits.argmax(-1), most, log_total, heat * full, mass * full, seeds, each)
    assert (shortlist_samples(logits, draws) >= 0).all()
    assert (shortlist_samples(logits, draws._replace(heat=1e-9 * full)) == -1).all()


@built
def test_too_many_that_may_win_are_left_untold() -> None:
    """With more equal candidates in a nucleus than fit the shortlist no draw is given (-1)."""
    row, vocab = np.zeros(1), 10 * ROOM
    seed, position = 1, position_for(1, 1)
    seeds = np.array([seed], np.uint64)
    draws = Draws(*2 * [row.astype(int)], row, row, row + 1, row + 0.9, seeds, np.array([position]))
    assert shortlist_samples(np.zeros((1, vocab), np.float32), draws).tolist() == [-1]


@pytest.mark.parametrize("broken", [-np.inf, np.inf, np.nan])
def test_logits_that_are_not_finite_are_an_error(broken: float) -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[1, 7] = broken
    with pytest.raises(FloatingPointError, match="row 1"), np.errstate(invalid="ignore"):
        sample(logits, [0, 0], [0, 0])


@built
def test_what_draws_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library with wrong draws is not used, with one warning."""
    right = Shortlist.within
    monkeypatch.setattr(Shortlist, "within", lambda *call: right(*call)[::-1])
    shortlist.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert shortlist() is None
            assert shortlist() is None
        (record,) = caplog.records
        assert "draws are wrong" in record.message
    finally:
        shortlist.cache_clear()
