"""The generate loop, a baseline for speed, does the same work as the reference engine."""

import asyncio

import pytest

from loadtest.generate_loop import GenerateLoop
from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from loadtest.searches import SPRIG
from search.engine import Branch, Sampling, Trajectory


@pytest.fixture(scope="module")
def loop() -> GenerateLoop:
    return GenerateLoop(threads=1)


@pytest.fixture(scope="module")
def reference() -> ReferenceEngine:
    return ReferenceEngine(ReferenceOptions(SPRIG.policy, SPRIG.prm, SPRIG.reward_format))


def test_a_padded_batch_draws_and_scores_as_the_reference_engine_does(loop, reference):
    """In a left-padded batch prefixes of three lengths have the steps and rewards of each alone."""
    prompts = [tuple(range(20, 20 + length)) for length in (5, 17, 11)]
    branches = [Branch(0, i, tokens, 7 + i, 24, i + 1) for i, tokens in enumerate(prompts)]
    steps_by_engine = [
        asyncio.run(engine.expand("t", branches, Sampling())) for engine in (loop, reference)
    ]
    assert [(s.tokens, s.text, s.finish) for s in steps_by_engine[0]] == [
        (s.tokens, s.text, s.finish) for s in steps_by_engine[1]
    ]
    steps = [s.tokens for s in steps_by_engine[0]]
    paths = [Trajectory(i, tuple(steps[: i + 1]), ("",) * (i + 1)) for i in range(3)]
    rewards = [asyncio.run(e.score("t", prompts[0], "", paths)) for e in (loop, reference)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)
