"""Sampling parameters, against transformers' processors and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hedgerow_sglang.noise import gumbel
from runtime.embedded.logits_processors import LogitsProcessors
from search.engine import LogitsParams, Sampling

VOCAB = 40
PROMPT, OUTPUT = [3, 4, 4, 5], [7, 7, 7, 9, 4]
PATH = np.array(PROMPT + OUTPUT)
EOS = frozenset({1})
LOGITS = np.zeros(10, dtype=np.float32)


def processors(params: LogitsParams, **sampling: float) -> LogitsProcessors:
    """The processors of a trajectory with PROMPT."""
    return LogitsProcessors(
        Sampling(logits=params, prompt_tokens=len(PROMPT), **sampling),  # type: ignore[arg-type]
        EOS,
    )


def row(seed: int) -> np.ndarray:
    """Random logits (VOCAB,), no two of them equal."""
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB + 1]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    repetition=st.sampled_from([0.8, 1.0, 1.3]),
    bias=st.sampled_from([(), ((2, 4.5), (7, -3.0))]),
)
def test_what_may_be_drawn_is_what_transformers_leaves(
    seed: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition: float,
    bias: tuple[tuple[int, float], ...],
) -> None:
    """Tokens and odds equal those of transformers' processors in vLLM's order."""
    warpers: list = []
    if bias:
        warpers.append(SequenceBiasLogitsProcessor({(token,): value for token, value in bias}))
    warpers += [RepetitionPenaltyLogitsProcessor(repetition), TemperatureLogitsWarper(temperature)]
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if 0 < top_k <= VOCAB:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    logits = row(seed)
    expected = LogitsProcessorList(warpers)(
        torch.from_numpy(PATH[None]), torch.from_numpy(logits[None].astype(np.float64))
    )[0].numpy()
    params = LogitsParams(top_k, min_p, bias, repetition_penalty=repetition)
    ours = processors(params, temperature=temperature, top_p=top_p)
    scores = ours.penalised(PATH, logits)
    scores = (scores - scores.max()) / temperature
    ids = ours.kept(scores)
    assert ids.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    assert scores[ids] - scores[ids].max() == pytest.approx(expected[ids] - expected.max())


def test_presence_and_frequency_by_hand() -> None:
    """By OpenAI's definition only the output counts: 7 occurs three times, 9 and 4 once; the
    prompt's 3 and 5 are not penalised."""
    ours = processors(LogitsParams(presence_penalty=0.5, frequency_penalty=0.25))
    expected = np.zeros(10)
    expected[7], expected[9], expected[4] = -0.5 - 0.75, -0.5 - 0.25, -0.5 - 0.25
    assert ours.penalised(PATH, LOGITS).tolist() == expected.tolist()


def test_a_repetition_penalty_counts_the_prompt_too() -> None:
    """A penalty of 2 for tokens of prompt or output makes 1 to 1/2 and -1 to -2."""
    ours = processors(LogitsParams(repetition_penalty=2.0))
    logits = np.where(np.arange(10) % 2, 1.0, -1.0).astype(np.float32)
    expected = [-1.0, 1.0, -1.0, 0.5, -2.0, 0.5, -1.0, 0.5, -1.0, 0.5]
    assert ours.penalised(PATH, logits).tolist() == expected


@pytest.mark.parametrize(("output", "allowed"), [(0, False), (4, False), (5, True), (6, True)])
def test_no_end_before_so_many_tokens(output: int, allowed: bool) -> None:
    """With ``min_tokens`` 5 only the sixth token may be the end token."""
    ours = processors(LogitsParams(min_tokens=5))
    scores = ours.penalised(np.array(PROMPT + [7] * output), LOGITS)
    assert (scores[1] > -np.inf) == allowed
    assert np.isfinite(np.delete(scores, 1)).all()


def test_the_bias_comes_before_the_penalties() -> None:
    """As in vLLM, a logit of 2 with bias 4 and penalty 2 is (2 + 4) / 2, not 2 / 2 + 4."""
    ours = processors(LogitsParams(logit_bias=((7, 4.0),), repetition_penalty=2.0))
    assert ours.penalised(PATH, LOGITS + 2)[7] == 3.0


@given(st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_a_draw_is_the_argmax_of_what_is_left_plus_noise(seed: int, top_k: int) -> None:
    """The noise is that of the token's id at the position after the path."""
    logits = row(seed % 1000)
    scores = logits.astype(np.float64) + gumbel([seed], [len(PATH)], VOCAB)[0]
    scores[np.argsort(-logits)[top_k:]] = -np.inf
    ours = processors(LogitsParams(top_k=top_k))
    assert ours.draw(PATH, seed, logits) == scores.argmax()
    ranked = ours.rank(PATH, seed, logits, 3)
    assert ranked == np.argsort(-scores)[: min(3, top_k)].tolist()


def test_greedy_is_the_highest_after_the_penalties() -> None:
    """Greedy draws take the highest penalised logit; ties go to the lower id."""
    ours = processors(LogitsParams(frequency_penalty=1.0), temperature=0.0)
    logits = LOGITS.copy()
    logits[[7, 4]] = 3.0
    assert ours.draw(PATH, 5, logits) == 4
    assert ours.rank(PATH, 5, logits, 3) == [4, 0, 1]


def test_neutral_values_ask_for_nothing() -> None:
    """Only values that are not neutral are listed by ``asked``."""
    assert LogitsParams(top_k=-1).active() == LogitsParams().active() == ()
    params = LogitsParams(top_k=2, min_p=0.1, logit_bias=((1, 1.0),), min_tokens=1)
    assert params.active() == ("top_k", "min_p", "logit_bias", "min_tokens")
    assert replace(params, presence_penalty=-1.0).active()[-1] == "presence_penalty"
