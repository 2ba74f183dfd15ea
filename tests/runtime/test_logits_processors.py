"""Sampling parameters: against transformers' processors, by hand, and whatever the engine does."""

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
    """Those of a trajectory with this prompt."""
    return LogitsProcessors(
        Sampling(logits=params, prompt_tokens=len(PROMPT), **sampling),  # type: ignore[arg-type]
        EOS,
    )


def row(seed: int) -> np.ndarray:
    """Logits that no two of are equal."""
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
    """The same tokens with the same odds, by its own processors in vLLM's order."""
    wanted: list = []
    if bias:
        wanted.append(SequenceBiasLogitsProcessor({(token,): value for token, value in bias}))
    wanted += [RepetitionPenaltyLogitsProcessor(repetition), TemperatureLogitsWarper(temperature)]
    if min_p:
        wanted.append(MinPLogitsWarper(min_p))
    if 0 < top_k <= VOCAB:
        wanted.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        wanted.append(TopPLogitsWarper(top_p))
    logits = row(seed)
    expected = LogitsProcessorList(wanted)(
        torch.from_numpy(PATH[None]), torch.from_numpy(logits[None].astype(np.float64))
    )[0].numpy()
    params = LogitsParams(top_k, min_p, bias, repetition_penalty=repetition)
    own = processors(params, temperature=temperature, top_p=top_p)
    scores = own.penalised(PATH, logits)
    scores = (scores - scores.max()) / temperature
    kept = own.kept(scores)
    assert kept.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    assert scores[kept] - scores[kept].max() == pytest.approx(expected[kept] - expected.max())


def test_presence_and_frequency_by_hand() -> None:
    """OpenAI's definition: of the output 7 stands three times, 9 and 4 once; the prompt's own 3 and
    5 are none of it."""
    own = processors(LogitsParams(presence_penalty=0.5, frequency_penalty=0.25))
    expected = np.zeros(10)
    expected[7], expected[9], expected[4] = -0.5 - 0.75, -0.5 - 0.25, -0.5 - 0.25
    assert own.penalised(PATH, LOGITS).tolist() == expected.tolist()


def test_a_repetition_penalty_counts_the_prompt_too() -> None:
    """2 for what was said: 1 becomes 1/2, -1 becomes -2."""
    own = processors(LogitsParams(repetition_penalty=2.0))
    logits = np.where(np.arange(10) % 2, 1.0, -1.0).astype(np.float32)
    expected = [-1.0, 1.0, -1.0, 0.5, -2.0, 0.5, -1.0, 0.5, -1.0, 0.5]
    assert own.penalised(PATH, logits).tolist() == expected


@pytest.mark.parametrize(("output", "allowed"), [(0, False), (4, False), (5, True), (6, True)])
def test_no_end_before_so_many_tokens(output: int, allowed: bool) -> None:
    """The sixth token may be the end where five are wanted before."""
    own = processors(LogitsParams(min_tokens=5))
    scores = own.penalised(np.array(PROMPT + [7] * output), LOGITS)
    assert (scores[1] > -np.inf) == allowed
    assert np.isfinite(np.delete(scores, 1)).all()


def test_the_bias_comes_before_the_penalties() -> None:
    """As in vLLM: (2 + 4) / 2, not 2 / 2 + 4."""
    own = processors(LogitsParams(logit_bias=((7, 4.0),), repetition_penalty=2.0))
    assert own.penalised(PATH, LOGITS + 2)[7] == 3.0


@given(st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_a_draw_is_the_argmax_of_what_is_left_plus_noise(seed: int, top_k: int) -> None:
    """The noise goes by the token's own id and the position after the path."""
    logits = row(seed % 1000)
    scores = logits.astype(np.float64) + gumbel([seed], [len(PATH)], VOCAB)[0]
    scores[np.argsort(-logits)[top_k:]] = -np.inf
    own = processors(LogitsParams(top_k=top_k))
    assert own.draw(PATH, seed, logits) == scores.argmax()
    ranked = own.rank(PATH, seed, logits, 3)
    assert ranked == np.argsort(-scores)[: min(3, top_k)].tolist()


def test_greedy_is_the_highest_after_the_penalties() -> None:
    """Equals go to the lower id."""
    own = processors(LogitsParams(frequency_penalty=1.0), temperature=0.0)
    logits = LOGITS.copy()
    logits[[7, 4]] = 3.0
    assert own.draw(PATH, 5, logits) == 4
    assert own.rank(PATH, 5, logits, 3) == [4, 0, 1]


def test_neutral_values_ask_for_nothing() -> None:
    """So that nothing changes for requests that send them; each other value does ask."""
    assert LogitsParams(top_k=-1).asked() == LogitsParams().asked() == ()
    other = LogitsParams(top_k=2, min_p=0.1, logit_bias=((1, 1.0),), min_tokens=1)
    assert other.asked() == ("top_k", "min_p", "logit_bias", "min_tokens")
    assert replace(other, presence_penalty=-1.0).asked()[-1] == "presence_penalty"
