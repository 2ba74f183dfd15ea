"""Sharing draws between searches changes neither their trees nor their reported cost."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from cli.shared_samples import SharedSamples, StandaloneCost
from runtime.accounting import no_flops
from search.controller import search
from search.engine import Branch, EngineDown, Sampling, Step, Trajectory
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import Finish
from tests.search.scripted_engine import ScriptedEngine, answer_of, encode

SPECS = [
    SearchSpec.model_validate({"policy": policy, "width": width, "seed": 9})
    for policy in ("self_consistency", "best_of_n", "beam", "rebase", "ets")
    for width in (1, 4, 8)
]
PROBLEM = Problem(encode("user: ?\n"), "?")


async def grow(engine: ScriptedEngine | SharedSamples, spec: SearchSpec, name: str) -> Outcome:
    """Run one search and return its outcome."""
    return await search(
        PROBLEM, spec, engine, tree_id=name, answer_of=answer_of, clock=itertools.count().__next__
    )


@pytest.mark.parametrize("at_once", [False, True])
async def test_shared_draws_grow_the_same_trees(at_once: bool) -> None:
    """All digests are the same, one after the other or all at once, with fewer steps drawn."""
    engine = ScriptedEngine()
    alone = [await grow(engine, spec, str(i)) for i, spec in enumerate(SPECS)]
    steps_alone = sum(map(len, engine.expanded))
    engine = ScriptedEngine()
    shared = SharedSamples(engine)
    work = [grow(shared, spec, str(i)) for i, spec in enumerate(SPECS)]
    outcomes = await asyncio.gather(*work) if at_once else [await search for search in work]
    assert [o.digest for o in outcomes] == [o.digest for o in alone]
    branches = [branch for call in engine.expanded for branch in call]
    assert len(branches) < steps_alone / 2
    assert len({(b.tokens, b.seed) for b in branches}) == len(branches)
    paths = [t.steps for call in engine.scored for t in call]
    assert len(set(paths)) == len(paths)
    embedded = [t.steps[-1] for call in engine.embedded for t in call]
    assert len(set(embedded)) == len(embedded) > 1
    assert not engine.live


async def test_a_row_is_charged_what_it_would_have_cost_alone() -> None:
    """The second of two equal searches draws nothing and costs as much as the first."""
    shared = SharedSamples(ScriptedEngine(), flops=lambda n, c, _=None: n + c)
    first = await grow(shared, SPECS[-1], "a")
    second = await grow(shared, SPECS[-1], "b")
    assert first.stats.engine == second.stats.engine
    assert first.stats.engine.decoded_tokens == first.stats.generated_tokens
    assert first.stats.engine.flops > 0


def test_the_cost_of_a_search_alone_by_hand() -> None:
    """Prompt of 3, two children of 2 tokens, then one child of 1 token below the first.

    Rows: prompt 3 (contexts 1+2+3), second tokens of the children 2 x 1 (context 4 each), the last
    token of the first child again (context 5). The reward model reads 3 + (2+1) + (2+1) + (1+1).
    """
    cost = StandaloneCost(lambda n, c, _=None: 1000.0 * n + c, no_flops)
    branches = [Branch(0, i, (7, 8, 9), i, 16, i + 1) for i in range(2)]
    steps = [Step((1, 2), "", Finish.STEP, 0.0, 0.0), Step((1, 3), "", Finish.STEP, 0.0, 0.0)]
    cost.note_steps(branches, steps)
    cost.scored((7, 8, 9), [Trajectory(1, ((1, 2),), ("",)), Trajectory(2, ((1, 3),), ("",))])
    cost.note_steps(
        [Branch(1, 0, (7, 8, 9, 1, 2), 5, 16, 3)], [Step((4,), "", Finish.END, 0.0, 0.0)]
    )
    cost.scored((7, 8, 9), [Trajectory(3, ((1, 2), (4,)), ("", ""))])
    counters = cost.counters
    assert (counters.prefilled_tokens, counters.decoded_tokens, counters.prm_tokens) == (3, 5, 11)
    assert counters.model_calls == 2 + 1 + 1 + 1
    assert counters.flops == 1000 * (3 + 2 + 1) + (6 + 4 + 4 + 5)


def test_a_step_is_charged_for_one_embedding() -> None:
    """Steps of 2 and 1 tokens, embedded alone: contexts 1 + 2 and 1; a second time is free."""
    cost = StandaloneCost(
        no_flops, no_flops, lambda n, c, logits=None: 1000.0 * n + 10 * c + (logits or 0)
    )
    trajectories = [
        Trajectory(i, ((9,), step), ("", "")) for i, step in enumerate(((1, 2), (3,), (3,)))
    ]
    cost.compared(trajectories)
    cost.compared(trajectories[:2])
    assert cost.counters.flops == 3000 + 10 * (3 + 1)


async def test_a_failure_reaches_everybody_who_waits_and_is_not_remembered() -> None:
    """Two merged requests fail together; when the engine is back the same request works."""
    engine = ScriptedEngine(fail_at=0)
    shared = SharedSamples(engine)
    branch = [Branch(0, 0, encode("ab"), 1, 16, 1)]
    calls = [shared.expand(name, branch, Sampling()) for name in "ab"]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDown, EngineDown]
    engine.down, engine.fail_at = False, None
    assert len(await shared.expand("a", branch, Sampling())) == 1


async def test_another_sampling_is_another_draw() -> None:
    """Draws at different temperatures are not shared."""
    engine = ScriptedEngine()
    shared = SharedSamples(engine)
    branch = [Branch(0, 0, encode("ab"), 1, 16, 1)]
    await shared.expand("a", branch, Sampling(temperature=1.0))
    await shared.expand("a", branch, Sampling(temperature=0.5))
    assert len(engine.expanded) == 2
