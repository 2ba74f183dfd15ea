"""Every reason for which a search stops by itself; budgets are exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch, PrefixTooLong
from search.outcome import Outcome
from search.policies.registry import POLICIES
from search.spec import SearchSpec, StopReason
from search.stats import path_length
from search.stop import may_end_early
from search.tree import ROOT, Finish
from tests.search.scripted_engine import ScriptedEngine, grow


async def run(engine: ScriptedEngine, *, context: int | None = None, **dials: object) -> Outcome:
    """Run a search of the one-token prompt ``Q``."""
    spec = SearchSpec.model_validate({"seed": 3, **dials})
    return await grow(engine, spec, context_tokens=context)


def chain(steps: int) -> ScriptedEngine:
    """An engine whose every branch has ``steps`` steps of four tokens, then the answer."""

    def say(branch: Branch) -> str:
        count = (len(branch.tokens) - 1) // 4
        return "The answer is 1." if count == steps else f"s{count}\n\n"

    return ScriptedEngine(say=say)


@pytest.mark.parametrize(
    ("dials", "early"),
    [
        ({}, False),
        ({"max_tokens": 100}, True),
        ({"max_kv_tokens": 100}, True),
        ({"deadline_ms": 100}, True),
        ({"consensus": "certain"}, True),
    ],
)
def test_what_may_end_a_search_early(dials: dict[str, object], *, early: bool) -> None:
    """Each budget, the deadline and consensus may; without them only the policy ends a search."""
    assert may_end_early(SearchSpec.model_validate(dials)) is early


async def test_answered() -> None:
    """All trajectories of the width ended by themselves."""
    assert (await run(chain(2), width=4)).stop_reason is StopReason.ANSWERED


async def test_depth() -> None:
    """A trajectory that reaches ``max_depth`` is cut there, finished, and named as the reason."""
    outcome = await run(chain(9), width=2, max_depth=3)
    assert outcome.stop_reason is StopReason.DEPTH
    assert [(n.depth, n.finish) for n in outcome.tree.finished()] == [(3, Finish.LIMIT)] * 2
    assert outcome.answer is None
    assert outcome.chosen is not None


async def test_a_step_that_ends_at_the_last_depth_is_no_cut() -> None:
    """An answer in step three of three gives ANSWERED."""
    assert (await run(chain(2), width=2, max_depth=3)).stop_reason is StopReason.ANSWERED


async def test_width_spent_by_trajectory_limits() -> None:
    """A trajectory never exceeds ``trajectory_tokens``: its last step has a lower limit."""
    engine = chain(9)
    outcome = await run(engine, width=1, trajectory_tokens=10, max_step_tokens=8)
    assert [b.limit for call in engine.expanded for b in call] == [8, 6, 2]
    assert [len(n.tokens) for n in outcome.tree.nodes[1:]] == [4, 4, 2]
    assert outcome.tree[3].finish is Finish.LIMIT
    assert outcome.stop_reason is StopReason.WIDTH_SPENT


async def test_width_spent_by_dead_branches() -> None:
    """Every branch is empty: nothing is finished or open, and the reply is the last open path."""
    outcome = await run(ScriptedEngine(say=lambda _: "\n\n"), width=3)
    assert outcome.stop_reason is StopReason.WIDTH_SPENT
    assert (outcome.chosen, outcome.answer, outcome.text) == (ROOT, None, "")
    assert outcome.vote == "last (every branch died)"


async def test_a_finished_part_of_the_width_is_not_all_of_it() -> None:
    """One of two ended, the other died: the reason is WIDTH_SPENT, but the answer counts."""
    engine = ScriptedEngine(say=lambda b: "\n\n" if b.child else "The answer is 1.")
    outcome = await run(engine, width=2)
    assert (outcome.stop_reason, outcome.answer) == (StopReason.WIDTH_SPENT, "1")


async def test_the_context_bounds_a_trajectory() -> None:
    """Prompt and reply stay within the context: 1 + 4 + 4 + 1 of 10 tokens."""
    outcome = await run(chain(9), width=1, context=10)
    assert [len(n.tokens) for n in outcome.tree.nodes[1:]] == [4, 4, 1]
    assert outcome.tree[3].finish is Finish.LIMIT


async def test_the_context_is_the_engines_by_default() -> None:
    """Without ``context_tokens`` the engine's own context is the limit."""
    engine = chain(9)
    engine.context_tokens = 6
    assert (await run(engine, width=1)).tree.generated_tokens == 5


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """The error names both sizes, and the engine is not called."""
    engine = chain(1)
    with pytest.raises(PrefixTooLong, match="prompt: 1 tokens; the context holds 1"):
        await run(engine, context=1)
    assert engine.expanded == []


async def test_kv() -> None:
    """Two open chains hold 1 + 2*4 tokens after a round: with a budget of 8 the search ends."""

    def say(branch: Branch) -> str:
        return f"{branch.child}{len(branch.tokens)}\n\n"

    outcome = await run(ScriptedEngine(say), policy="best_of_n", width=2, max_kv_tokens=8)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 1)
    outcome = await run(ScriptedEngine(say), policy="best_of_n", width=2, max_kv_tokens=9)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 2)


async def test_kv_counts_equal_prefixes_once() -> None:
    """Two chains with equal steps hold 1 + 4 tokens together, as they do in an engine."""
    outcome = await run(chain(5), policy="best_of_n", width=2, max_kv_tokens=4)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 1)
    outcome = await run(chain(5), policy="best_of_n", width=2, max_kv_tokens=5)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 2)


async def test_max_tokens_commits_children_in_order_while_they_fit() -> None:
    """Of three children of four tokens a budget of 11 keeps two."""
    engine = chain(5)
    outcome = await run(engine, width=3, max_tokens=11)
    assert outcome.stop_reason is StopReason.MAX_TOKENS
    assert [n.id for n in outcome.tree.nodes] == [0, 1, 2]
    assert outcome.tree.generated_tokens == 8


async def test_max_tokens_met_exactly_stops_before_another_round() -> None:
    """When twelve of twelve tokens are spent nothing more is drawn."""
    engine = chain(5)
    outcome = await run(engine, width=3, max_tokens=12)
    assert (outcome.stop_reason, len(engine.expanded)) == (StopReason.MAX_TOKENS, 1)
    assert outcome.tree.generated_tokens == 12


async def test_a_budget_that_the_last_round_fills_is_not_the_reason() -> None:
    """The reason is ANSWERED if the answer is complete when the last token is spent."""
    free = await run(chain(1), width=2)
    bounded = await run(chain(1), width=2, max_tokens=free.tree.generated_tokens)
    assert bounded.stop_reason is StopReason.ANSWERED
    assert bounded.digest == free.digest


async def test_finished_trajectories_vote_when_a_budget_ends_the_search() -> None:
    """The outcome has the best answer so far."""
    engine = ScriptedEngine(say=lambda b: "s\n\n" if b.child else "The answer is 1.")
    outcome = await run(engine, policy="best_of_n", width=2, max_tokens=20)
    assert (outcome.stop_reason, outcome.answer) == (StopReason.MAX_TOKENS, "1")


@pytest.mark.parametrize("budget", [{"max_tokens": 12}, {"max_kv_tokens": 8}])
async def test_a_budget_met_before_anything_finished_leaves_the_best_path(
    budget: dict[str, int],
) -> None:
    """The outcome is the first step with the highest reward, without an answer."""
    engine = chain(5)
    engine.score_of = lambda texts: {"0": 0.2, "1": 0.7, "2": 0.6}[texts[-1][0]]
    engine.say = lambda branch: f"{branch.child}s\n\n"
    outcome = await run(engine, policy="beam", width=3, **budget)
    assert (outcome.chosen, outcome.text, outcome.answer) == (2, "1s\n\n", None)
    assert outcome.vote == "best_last (no trajectory finished)"
    assert outcome.stats.reply_tokens == 4


@pytest.mark.promise("A search never exceeds its token budgets, which count the committed tree.")
@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(sorted(POLICIES)),
    width=st.integers(1, 9),
    budget=st.integers(1, 200),
    length=st.integers(1, 60),
    step=st.integers(1, 20),
)
async def test_no_budget_is_ever_exceeded(
    seed: int, policy: str, width: int, budget: int, length: int, step: int
) -> None:
    """Tokens of tree, trajectory and step stay within bounds, and a budget only cuts a tree short.

    Every node of the bounded tree is the unbounded tree's node of that id.
    """
    dials = {"seed": seed, "policy": policy, "width": width, "trajectory_tokens": length}
    free = await run(ScriptedEngine(), max_step_tokens=step, **dials)
    bounded = await run(ScriptedEngine(), max_step_tokens=step, max_tokens=budget, **dials)
    assert bounded.tree.generated_tokens <= budget
    assert all(len(n.tokens) <= step for n in free.tree.nodes)
    assert all(path_length(free.tree, n.id) <= length for n in free.tree.nodes)
    ours = [(n.parent, n.tokens, n.reward) for n in bounded.tree.nodes]
    assert ours == [(n.parent, n.tokens, n.reward) for n in free.tree.nodes][: len(ours)]
    assert (bounded.stop_reason is StopReason.MAX_TOKENS) == (len(ours) < len(free.tree))
