"""Properties of every backtracking search, for any steps and rewards."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch
from search.events import Event, Expanded, Pruned, Selected
from search.outcome import Outcome
from search.policies.policy import frontier_of
from search.policies.registry import POLICIES
from search.policies.visit_counts import ExpansionBudget, expansions, expansions_below
from search.spec import SearchSpec, StopReason
from search.tree import ROOT
from search.tree_json import from_json, to_json
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.test_width import ROUGH, dead_stay_dead

BACKTRACKING = [
    n for n in POLICIES if isinstance(POLICIES[n](SearchSpec(policy=n)), ExpansionBudget)
]
BOTH = pytest.mark.parametrize("policy", BACKTRACKING)


async def run(engine: ScriptedEngine, **dials: object) -> tuple[Outcome, list[Event]]:
    """Run a search; its outcome and events."""
    events: list[Event] = []
    outcome = await grow(
        engine,
        SearchSpec.model_validate({"seed": 1, "max_depth": 6, **dials}),
        listen=events.append,
    )
    return outcome, events


dials = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "width": st.integers(1, 40),
        "branch": st.integers(1, 5),
        "parallel": st.integers(1, 6),
        "expansions": st.integers(1, 40),
        "max_tokens": st.none() | st.integers(1, 400),
        "enough_answers": st.integers(1, 8),
    }
)


@BOTH
@settings(max_examples=60)
@given(dials=dials, engine=ROUGH)
async def test_no_bound_is_ever_exceeded(
    policy: str, dials: dict[str, int], engine: ScriptedEngine
) -> None:
    """Leaves a round, expansions, children an expansion and width hold; child indices go on."""
    outcome, events = await run(engine, policy=policy, **dials)
    tree, branch = outcome.tree, dials["branch"]
    rounds = Counter(event.round for event in events if isinstance(event, Selected))
    assert max(rounds.values()) <= dials["parallel"]
    assert all(e.children <= branch for e in events if isinstance(e, Selected))
    assert expansions_below(tree, branch)[ROOT] <= dials["expansions"]
    assert len(tree.finished()) <= dials["width"]
    assert not [e for e in events if isinstance(e, Pruned) and e.reason == "policy"]
    for node in tree.nodes:
        assert [tree[c].child for c in node.children] == list(range(len(node.children)))
        if policy == "best_first" and node.id != ROOT:
            assert expansions(node, branch) <= 1
    exhausted = expansions_below(tree, branch)[ROOT] == dials["expansions"]
    if outcome.stop_reason is StopReason.WIDTH_SPENT and not exhausted:
        assert len(tree.finished()) == dials["width"]


@BOTH
@settings(max_examples=40)
@given(dials=dials, engine=ROUGH)
async def test_the_dead_stay_dead(
    policy: str, dials: dict[str, int], engine: ScriptedEngine
) -> None:
    """Nothing grows at or below a node that a hint called dead, and no such node may still grow."""
    outcome, _ = await run(engine, policy=policy, **dials)
    tree = outcome.tree
    spec = SearchSpec.model_validate({"policy": policy, **dials})
    alive = tree.above(frontier_of(POLICIES[spec.policy](spec), tree))
    assert not alive & dead_stay_dead(engine, tree)


@pytest.mark.promise("A backtracking policy has no memory: its plan follows from the tree alone.")
@BOTH
@settings(max_examples=40)
@given(dials=dials, engine=ROUGH)
async def test_same_tree_same_plan(
    policy: str, dials: dict[str, int], engine: ScriptedEngine
) -> None:
    """A policy has no memory: a tree read from JSON has the same plan as the original."""
    outcome, _ = await run(engine, policy=policy, **dials)
    spec, reloaded = outcome.spec, from_json(to_json(outcome.tree))
    plan = POLICIES[spec.policy](spec).plan(outcome.tree)
    assert POLICIES[spec.policy](spec).plan(reloaded) == plan


@BOTH
async def test_it_goes_back(policy: str) -> None:
    """Some round grows an open node that at least two rounds had passed over."""
    outcome, events = await run(ScriptedEngine(), policy=policy, width=40, enough_answers=40)
    born, waits = {ROOT: 0}, []
    for event in events:
        if isinstance(event, Selected):
            waits.append(event.round - born[event.node])
        elif isinstance(event, Expanded):
            born[event.node] = event.round
    assert max(waits) > 2
    assert outcome.answer is not None


@BOTH
async def test_nothing_finished_is_said_so(policy: str) -> None:
    """After two expansions of a long task there is no reply, and WIDTH_SPENT is the reason."""
    engine = ScriptedEngine(say=lambda b: f"s{len(b.tokens)}\n\n")
    outcome, _ = await run(engine, policy=policy, expansions=2, max_depth=9)
    assert (outcome.stop_reason, outcome.chosen) == (StopReason.WIDTH_SPENT, None)
    assert outcome.stats.reply_tokens == 0


@BOTH
async def test_a_full_width_has_the_reasons_of_any_search(policy: str) -> None:
    """The reason is ANSWERED if all replies ended, DEPTH if some were cut at ``max_depth``."""
    answered, _ = await run(
        ScriptedEngine(say=lambda _: "The answer is 1."), policy=policy, width=3
    )
    assert answered.stop_reason is StopReason.ANSWERED
    endless = ScriptedEngine(say=lambda b: f"s{len(b.tokens)}\n\n")
    limited, _ = await run(endless, policy=policy, width=3, max_depth=3)
    assert limited.stop_reason is StopReason.DEPTH


@BOTH
async def test_kv_counts_every_path_that_may_be_returned_to(policy: str) -> None:
    """Three open first steps of 4 tokens and a prompt of 1 are 13, though only one grows next."""

    def say(branch: Branch) -> str:
        return f"{branch.child}{len(branch.tokens) % 10}\n\n"

    dials = {"policy": policy, "parallel": 1}
    outcome, _ = await run(ScriptedEngine(say), max_kv_tokens=12, **dials)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.KV, 1)
    assert outcome.stats.kv_tokens_peak == 13
    outcome, _ = await run(ScriptedEngine(say), max_kv_tokens=13, **dials)
    assert outcome.stats.rounds == 2
    assert outcome.stats.kv_tokens_peak == 13 + 12
