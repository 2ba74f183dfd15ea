"""Rows of a batch draw by the seeds of the steps that they are in. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hedgerow_sglang import chain_seeds
from hedgerow_sglang.chain_seeds import KEPT, chain_seed, learn_ends, next_seeds
from hedgerow_sglang.step_chain import StepChain, StepEnds

ENDS = StepEnds.of((b"a", b"\n", b"\n\n"), [b"\n\n"])


def request(*drawn: int, **params: Any) -> SimpleNamespace:
    """One in the scheduler."""
    told = SimpleNamespace(custom_params=params or None)
    return SimpleNamespace(sampling_params=told, output_ids=list(drawn), to_finish=None)


def test_a_row_has_the_seed_of_its_step() -> None:
    """Before each token; other rows keep theirs."""
    learn_ends(ENDS.param())
    chain = StepChain((10, 20, 30), 8, ENDS.name)
    one, plain = request(**chain.param()), request(0)
    assert (chain_seed(one), chain_seed(plain)) == (10, None)
    seeds = torch.tensor([10, 7])
    batch = SimpleNamespace(reqs=[one, plain], sampling_info=SimpleNamespace(sampling_seed=seeds))
    for token, seed in ((0, 10), (1, 10), (1, 20), (2, 30)):
        one.output_ids.append(token)
        next_seeds(batch)
        assert seeds.tolist() == [seed, 7]
    batch.sampling_info.sampling_seed = None
    next_seeds(batch)


def test_a_request_that_begins_anew_goes_on_in_its_step() -> None:
    """One that was preempted: its tokens are there."""
    learn_ends(ENDS.param())
    chain = StepChain((10, 20, 30), 8, ENDS.name)
    assert chain_seed(request(0, 2, 0, **chain.param())) == 20


def test_few_ways_to_end_a_step_are_remembered() -> None:
    """Those that came last."""
    for letter in range(KEPT + 3):
        learn_ends(StepEnds(({letter: -1},)).param())
    assert len(chain_seeds._known) == KEPT
    learn_ends({})
