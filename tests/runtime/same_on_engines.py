"""Compares an engine on servers with the embedded one: equal steps, and rewards within a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.embedded.embedded_engine import EmbeddedEngine
from search.engine import Branch, Engine, Sampling, Step, Trajectory
from search.tree import Finish
from tests.runtime.sglang.real_searches import prompt_of

GREEDY = Sampling(temperature=0.0, stop=("\n\n",), max_step_tokens=64)


async def same_steps(
    engine: Engine, embedded: EmbeddedEngine, question: str, sampling: Sampling = GREEDY
) -> list[tuple[Step, Step]]:
    """Draw steps to the end on both engines and compare them; the pairs (engine, embedded)."""
    steps: list[tuple[Step, Step]] = []
    while not steps or (steps[-1][0].finish is Finish.STEP and len(steps) < 8):
        prefix = prompt_of(question) + tuple(token for ours, _ in steps for token in ours.tokens)
        branch = Branch(len(steps), 0, prefix, 1, 64, len(steps) + 1)
        (ours,) = await engine.expand(question, [branch], sampling)
        (theirs,) = await embedded.expand(question, [branch], sampling)
        assert (ours.tokens, ours.text, ours.finish) == (theirs.tokens, theirs.text, theirs.finish)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        steps.append((ours, theirs))
    return steps


async def near_rewards(
    engine: Engine,
    embedded: EmbeddedEngine,
    question: str,
    steps: Sequence[tuple[Step, Step]],
    within: float,
) -> None:
    """Check that both engines' rewards of the steps differ by at most ``within``."""
    our_steps = [ours for ours, _ in steps]
    paths = [
        Trajectory(n, tuple(s.tokens for s in our_steps[:n]), tuple(s.text for s in our_steps[:n]))
        for n in range(1, len(our_steps) + 1)
    ]
    ours = await engine.score(question, prompt_of(question), question, paths)
    theirs = await embedded.score(question, prompt_of(question), question, paths)
    assert ours == pytest.approx(theirs, abs=within)
