"""Rows of a batch draw with the seeds of their current steps. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hedgerow_sglang import chain_seeds
from hedgerow_sglang.chain_seeds import KEPT, chain_seed, learn_ends, next_seeds
from hedgerow_sglang.step_chain import StepChain, StepEnds

ENDS = StepEnds.of((b"a", b"\n", b"\n\n"), [b"\n\n"])


def request(*tokens: int, **params: Any) -> SimpleNamespace:
    """A request as the scheduler holds it, with these output tokens and custom params."""
    sampling = SimpleNamespace(custom_params=params or None)
    return SimpleNamespace(sampling_params=sampling, output_ids=list(tokens), to_finish=None)


def test_a_row_has_the_seed_of_its_step() -> None:
    """A chain's row gets its step's seed before each token; other rows keep their own seed."""
    learn_ends(ENDS.param())
    chain = StepChain((10, 20, 30), 8, ENDS.name)
    row, plain = request(**chain.param()), request(0)
    assert (chain_seed(row), chain_seed(plain)) == (10, None)
    seeds = torch.tensor([10, 7])
    batch = SimpleNamespace(reqs=[row, plain], sampling_info=SimpleNamespace(sampling_seed=seeds))
    for token, seed in ((0, 10), (1, 10), (1, 20), (2, 30)):
        row.output_ids.append(token)
        next_seeds(batch)
        assert seeds.tolist() == [seed, 7]
    batch.sampling_info.sampling_seed = None
    next_seeds(batch)


def test_a_request_that_begins_anew_goes_on_in_its_step() -> None:
    """A preempted request keeps its output tokens, so it resumes with the current step's seed."""
    learn_ends(ENDS.param())
    chain = StepChain((10, 20, 30), 8, ENDS.name)
    assert chain_seed(request(0, 2, 0, **chain.param())) == 20


def test_few_ways_to_end_a_step_are_remembered() -> None:
    """Only the ``KEPT`` step ends learned last are remembered."""
    for letter in range(KEPT + 3):
        learn_ends(StepEnds(({letter: -1},)).param())
    assert len(chain_seeds._known) == KEPT
    learn_ends({})
