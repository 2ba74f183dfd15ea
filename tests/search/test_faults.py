"""Deadlines, cancellation and failing engines: trees are released, rounds are whole."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from search.controller import search
from search.counters import Counters
from search.engine import Branch, EngineDown, EngineError, KvFull, RewardMissing, Sampling, Step
from search.events import Event
from search.outcome import Outcome
from search.policies.ets import Ets
from search.policies.policy import Round
from search.problem import Problem
from search.spec import SearchSpec, StopReason
from search.tree import Tree
from tests.search.scripted_engine import ScriptedEngine, answer_of, encode

PROBLEM = Problem(encode("Q: "), "Q")


@dataclass
class Clock:
    """A clock in seconds that a test advances."""

    now: float = 0.0

    def __call__(self) -> float:
        """The current time."""
        return self.now

    def tick(self) -> None:
        """Advance by a second."""
        self.now += 1.0


async def run(
    engine: ScriptedEngine,
    clock: Callable[[], float] = lambda: 0.0,
    deadline: float | None = None,
    listen: Callable[[Event], None] | None = None,
    **dials: object,
) -> Outcome:
    """Run a search of ``PROBLEM``."""
    spec = SearchSpec.model_validate({"seed": 5, "width": 4, **dials})
    return await search(
        PROBLEM,
        spec,
        engine,
        tree_id="t",
        answer_of=answer_of,
        clock=clock,
        deadline=deadline,
        listen=listen,
    )


async def test_an_engine_out_of_kv_ends_the_search_with_what_it_has() -> None:
    """The round under way is dropped, finished trajectories vote, the tree is released."""
    free = await run(ScriptedEngine(), seed=1, width=9)

    class Small(ScriptedEngine):
        async def expand(
            self, tree: str, branches: Sequence[Branch], sampling: Sampling
        ) -> list[Step]:
            if len(self.expanded) == 2:
                raise KvFull("kv_tokens: 100 are all held for searches")
            return await super().expand(tree, branches, sampling)

    engine = Small()
    outcome = await run(engine, seed=1, width=9)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 2)
    assert [n.tokens for n in outcome.tree.nodes] == [
        n.tokens for n in free.tree.nodes[: len(outcome.tree)]
    ]
    assert engine.released == ["t"]


async def test_a_round_that_ends_too_late_is_dropped_whole() -> None:
    """With a round a second and a deadline at 2.5 the third is dropped; finished replies vote."""
    free = await run(ScriptedEngine(), seed=1, width=9)
    assert free.stats.rounds > 3
    clock = Clock()
    engine = ScriptedEngine(on_expand=clock.tick)
    late = await run(engine, clock, 2.5, seed=1, width=9)
    assert (late.stop_reason, late.stats.rounds) == (StopReason.DEADLINE, 2)
    assert len(engine.expanded) == 3
    assert late.tree.tokens(len(late.tree) - 1) == free.tree.tokens(len(late.tree) - 1)
    assert late.chosen is not None
    assert {c.answer for c in late.answers} <= {c.answer for c in free.answers}
    assert engine.live == set()


async def test_scores_that_come_too_late_drop_the_round_too() -> None:
    """Steps enter the tree only together with their rewards."""
    clock = Clock()
    outcome = await run(ScriptedEngine(on_score=clock.tick), clock, 0.5)
    assert (outcome.stop_reason, len(outcome.tree)) == (StopReason.DEADLINE, 1)


async def test_nothing_finished_by_the_deadline_chooses_nothing() -> None:
    """The outcome has no reply but reports its costs."""
    clock = Clock()
    engine = ScriptedEngine(on_expand=clock.tick)
    outcome = await run(engine, clock, 0.5)
    assert (outcome.stop_reason, outcome.chosen, outcome.text) == (StopReason.DEADLINE, None, "")
    assert outcome.stats.engine == Counters(decoded_tokens=4, model_calls=2, prm_tokens=4)


async def test_a_deadline_that_has_passed_asks_for_nothing() -> None:
    """No round is started."""
    engine = ScriptedEngine()
    outcome = await run(engine, lambda: 9.0, 9.0)
    assert (outcome.stop_reason, engine.expanded) == (StopReason.DEADLINE, [])


async def test_an_engine_that_hangs_is_left_at_the_deadline() -> None:
    """The deadline interrupts a call that never returns, and the tree is released."""
    engine = ScriptedEngine(gate=asyncio.Event())
    outcome = await run(engine, deadline=0.01)
    assert outcome.stop_reason is StopReason.DEADLINE
    assert (engine.released, engine.aborted, engine.live) == (["t"], [], set())


@pytest.mark.parametrize("call", ["expand", "score", "embed"])
async def test_an_engine_that_stands_still_costs_no_reply_its_time(call: str) -> None:
    """Whichever call hangs, and although release and abort hang too, the trajectories of earlier
    rounds are voted on; the tree's cost is unknown."""
    engine = ScriptedEngine()
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            engine.still = frozenset({call, "release", "abort"})

    if call == "expand":
        engine.on_score = stop
    else:
        engine.on_expand = stop
    async with asyncio.timeout(30):
        outcome = await run(engine, deadline=0.05, seed=1, width=9, policy="ets")
    assert outcome.stop_reason is StopReason.DEADLINE
    assert outcome.stats.rounds == (2 if call == "expand" else 1)
    assert (outcome.stats.engine, outcome.stats.cost_known) == (Counters(), False)
    assert (engine.released, engine.aborted) == (["t"], [])


async def test_an_engine_that_stops_after_the_last_round_costs_no_answer() -> None:
    """The tree is complete: if release hangs or fails only the cost is unknown."""
    free = await run(ScriptedEngine())

    class Dead(ScriptedEngine):
        async def release(self, tree: str) -> Counters:
            raise EngineDown("gone")

    for engine in (ScriptedEngine(still=frozenset({"release"})), Dead()):
        outcome = await run(engine, deadline=0.05)
        assert (outcome.digest, outcome.answer) == (free.digest, free.answer)
        assert outcome.stop_reason is free.stop_reason
        assert (free.stats.cost_known, outcome.stats.cost_known) == (True, False)


@pytest.mark.parametrize("deadline", [None, 0.5])
async def test_an_abort_that_never_returns_holds_up_nobody(deadline: float | None) -> None:
    """Cancelling and an engine's error come through at once, with or without a deadline."""
    still = frozenset({"expand", "abort"})
    engine = ScriptedEngine(still=still)
    task = asyncio.create_task(run(engine, deadline=deadline))
    await engine.waiting.wait()
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
        failing = ScriptedEngine(fail_at=1, still=still - {"expand"})
        with pytest.raises(EngineDown):
            await run(failing, deadline=deadline)
    assert engine.aborted == failing.aborted == ["t"]


@pytest.mark.parametrize("consensus", [None, 0.9])
async def test_answers_that_take_long_to_compare_are_told_apart_by_their_spelling(
    consensus: float | None,
) -> None:
    """At the deadline the vote compares spelling, and says so; the comparing thread ends later."""
    never, finished = threading.Event(), threading.Event()

    def same(first: str, second: str) -> bool:
        never.wait(0.3)
        finished.set()
        return True

    engine = ScriptedEngine()
    outcome = await search(
        PROBLEM,
        SearchSpec.model_validate({"seed": 5, "width": 9, "consensus": consensus}),
        engine,
        tree_id="t",
        answer_of=answer_of,
        same_answer=same,
        clock=time.monotonic,
        deadline=time.monotonic() + 0.05,
    )
    assert not finished.is_set()
    assert outcome.stop_reason is StopReason.DEADLINE
    assert outcome.vote.endswith("spelling: the deadline came)")
    assert outcome.chosen is not None
    assert engine.live == set()
    never.set()


async def test_planning_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that takes too long, since a solver has no time limit, is dropped at the deadline."""
    never = threading.Event()

    def plan(self: Ets, tree: Tree) -> Round | None:
        never.wait(0.3)
        return None

    monkeypatch.setattr(Ets, "plan", plan)
    outcome = await run(ScriptedEngine(), deadline=0.05, policy="ets")
    assert (outcome.stop_reason, len(outcome.tree)) == (StopReason.DEADLINE, 1)
    never.set()


async def test_cancelling_aborts_the_tree() -> None:
    """A cancelled search aborts its tree and stays cancelled."""
    engine = ScriptedEngine(gate=asyncio.Event())
    task = asyncio.create_task(run(engine))
    await engine.waiting.wait()
    assert engine.live == {"t"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.aborted, engine.released, engine.live) == (["t"], [], set())


@pytest.mark.parametrize("call", [0, 1])
async def test_an_engine_error_comes_through_and_the_tree_is_let_go(call: int) -> None:
    """The error comes through and the tree is aborted, whichever call fails."""
    engine = ScriptedEngine(fail_at=call)
    with pytest.raises(EngineDown, match="the engine is down"):
        await run(engine)
    assert (engine.aborted, engine.live) == (["t"], set())


async def test_an_abort_that_fails_does_not_hide_the_first_error() -> None:
    """An engine that is down cannot abort either; the first error is the one that is raised."""

    class Dead(ScriptedEngine):
        async def abort(self, tree: str) -> Counters:
            raise EngineDown("still down")

    with pytest.raises(EngineDown, match="the engine is down"):
        await run(Dead(fail_at=1))


async def test_a_timeout_inside_the_engine_is_not_the_deadline() -> None:
    """An engine's own TimeoutError is raised, not taken for the deadline."""

    class Slow(ScriptedEngine):
        async def expand(
            self, tree: str, branches: Sequence[Branch], sampling: Sampling
        ) -> list[Step]:
            raise TimeoutError("of the engine's own")

    with pytest.raises(TimeoutError, match="of the engine's own"):
        await run(Slow(), deadline=60.0)


async def test_a_listener_that_fails_ends_the_search() -> None:
    """The listener's error comes through, and the tree is aborted."""

    def broken(event: Event) -> None:
        if event.name == "expanded":
            raise ConnectionError("nobody listens")

    engine = ScriptedEngine()
    with pytest.raises(ConnectionError):
        await run(engine, listen=broken)
    assert (engine.aborted, engine.live) == (["t"], set())


async def test_an_engine_without_a_reward_model_is_refused_at_once() -> None:
    """The error names the engine, the policy and the vote; nothing is drawn."""
    engine = ScriptedEngine(scores=False)
    with pytest.raises(RewardMissing, match="engine scripted has no reward model; policy rebase"):
        await run(engine)
    assert engine.expanded == []
    assert (await run(engine, policy="self_consistency")).answer is not None


@pytest.mark.promise(
    "A reward that is not a number from 0 to 1 fails the search with an error that names the "
    "engine and its models."
)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.1, 1.1])
async def test_a_reward_that_is_none_is_an_error(wrong: float) -> None:
    """A reward outside of [0, 1] is an error that names the engine and its models."""
    engine = ScriptedEngine(score_of=lambda texts: wrong if texts[-1] == "b\n\n" else 0.5)
    engine.say = lambda b: "ab"[b.child] + "\n\n"
    with pytest.raises(RewardMissing, match=r"scripted .*dice.* gave 1 rewards in .* for 2 traj"):
        await run(engine, width=2)
    assert (engine.aborted, engine.live) == (["t"], set())


@pytest.mark.parametrize(("wrong", "count"), [((), 0), ((0.5,), 1), ((0.5,) * 3, 3)])
async def test_rewards_that_are_not_one_each_are_an_error(
    wrong: tuple[float, ...], count: int
) -> None:
    """A missing reward is not taken for 0, and a surplus one is not ignored."""

    class Wrong(ScriptedEngine):
        async def score(self, *args: Any) -> list[float]:
            await super().score(*args)
            return list(wrong)

    engine = Wrong()
    engine.say = lambda b: "ab"[b.child] + "\n\n"
    with pytest.raises(RewardMissing, match=rf"gave {count} rewards in .* for 2 trajectories"):
        await run(engine, width=2)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda steps: steps[1:], "drew 3 steps for 4 branches"),
        (lambda steps: [*steps, steps[0]], "drew 5 steps for 4 branches"),
        (lambda steps: [Step((), "", s.finish, 0.0, 0.0) for s in steps], "a step of 0 tokens"),
        (
            lambda steps: [Step((1,) * 9, "", s.finish, 0.0, 0.0) for s in steps],
            "1 to 8 were asked",
        ),
    ],
)
async def test_steps_that_were_not_asked_for_are_an_error(
    steps: Callable[[list[Step]], list[Step]], message: str
) -> None:
    """A wrong number of steps, or of tokens in one, never enters the tree."""

    class Wrong(ScriptedEngine):
        async def expand(
            self, tree: str, branches: Sequence[Branch], sampling: Sampling
        ) -> list[Step]:
            return steps(await super().expand(tree, branches, sampling))

    with pytest.raises(EngineError, match=message):
        await run(Wrong(), max_step_tokens=8)
