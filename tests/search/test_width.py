"""Width: every level-by-level policy spends exactly its width."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch, RewardMissing
from search.events import Event, Expanded, Finished, Selected
from search.outcome import Outcome
from search.policies.policy import BacktrackingPolicy, Scores
from search.policies.registry import POLICIES
from search.spec import PolicyName, SearchSpec, StopReason
from search.tree import NodeState, Tree
from tests.search.scripted_engine import ScriptedEngine, dice, grow
from tests.search.trees import END, STEP, row, tree_of

LEVEL_BY_LEVEL = sorted(
    name
    for name, policy in POLICIES.items()
    if not isinstance(policy(SearchSpec(policy=name)), BacktrackingPolicy)
)
ALL = pytest.mark.parametrize("policy", LEVEL_BY_LEVEL)
BY_BREADTH = {"tot_bfs"}
"""Their rounds are as wide as the leaves they keep; their own tests check the width."""
SCORED = sorted(
    name
    for name, policy in POLICIES.items()
    if name != "adaptive" and policy(SearchSpec(policy=name)).scores is Scores.ALL
)
"""Policies that read the rewards of every round; ``adaptive`` does not while its chains grow."""
BY_WIDTH = pytest.mark.parametrize("policy", sorted(set(LEVEL_BY_LEVEL) - BY_BREADTH))


def rough(empty: int, ends: int, coarse: int) -> ScriptedEngine:
    """An engine with ``empty`` per cent empty steps, ``ends`` per cent ends, and coarse rewards.

    ``coarse``: the number of different rewards; with one, everything is a tie.
    """

    def say(branch: Branch) -> str:
        roll = dice(branch.tokens, branch.seed) % 100
        if roll < empty:
            return "\n\n"
        return "The answer is 1." if roll < empty + ends else f"s{roll % 5}\n\n"

    return ScriptedEngine(say, lambda texts: dice(tuple(texts)) % coarse / coarse)


ROUGH = st.builds(rough, st.integers(0, 40), st.integers(0, 50), st.integers(1, 50))


def widths(events: list[Event]) -> Counter[int]:
    """The number of children planned in each round."""
    planned = Counter[int]()
    for event in events:
        if isinstance(event, Selected):
            assert event.children > 0
            planned[event.round] += event.children
    return planned


def dead_stay_dead(engine: ScriptedEngine, tree: Tree) -> set[int]:
    """The nodes that hints called dead; checks that nothing grew at or below one afterwards."""
    dead = set[int]()
    for hint in engine.hints:
        dead |= set(hint.dead)
        for node_id in hint.active:
            assert not dead & {step.id for step in tree.chain(node_id)}
    return dead


async def watch(
    engine: ScriptedEngine, policy: PolicyName, width: int, seed: int
) -> tuple[Outcome, list[Event]]:
    """Run a search; its outcome and events."""
    events: list[Event] = []
    spec = SearchSpec(policy=policy, width=width, seed=seed, max_depth=6)
    outcome = await grow(engine, spec, listen=events.append)
    return outcome, events


@ALL
def test_a_spent_width_plans_nothing_whatever_is_open(policy: PolicyName) -> None:
    """Of width 1 one has finished: the open leaf beside it gets no round, not even an empty one."""
    tree = tree_of((0, "a", END, 0.2), (0, "b", STEP, 0.9))
    assert POLICIES[policy](SearchSpec(policy=policy, width=1)).plan(tree) is None


@ALL
def test_where_nothing_is_open_nothing_is_planned(policy: PolicyName) -> None:
    """There is no plan, whether all of the width has finished or less."""
    for width in (2, 3):
        spec = SearchSpec(policy=policy, width=width)
        assert POLICIES[policy](spec).plan(row(0.5, 0.5, finish=END)) is None


@pytest.mark.parametrize("policy", SCORED)
def test_a_missing_reward_is_an_error(policy: PolicyName) -> None:
    """A node without a reward is never dropped silently: the error names node and policy."""
    message = f"node 2 has no reward; policy {policy.removesuffix('_kv')}"
    with pytest.raises(RewardMissing, match=message):
        POLICIES[policy](SearchSpec(policy=policy, width=4)).plan(row(0.5, None))


@pytest.mark.promise(
    "Each round of a level-by-level policy (not `tot_bfs`) draws exactly the width less the "
    "finished trajectories."
)
@pytest.mark.promise(
    "A level-by-level policy (not `tot_bfs`) finishes exactly its width unless branches die or "
    "reach the depth limit."
)
@BY_WIDTH
@settings(max_examples=25)
@given(
    width=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    empty=st.integers(0, 40),
    ends=st.integers(0, 50),
    coarse=st.integers(1, 50),
)
async def test_every_round_spends_the_remaining_width(
    policy: PolicyName, width: int, seed: int, empty: int, ends: int, coarse: int
) -> None:
    """A round draws exactly width minus finished children; no more than the width ever finish.

    A search leaves some width unspent only if the last open branches died.
    """
    outcome, events = await watch(rough(empty, ends, coarse), policy, width, seed)
    planned, expanded, finished = widths(events), Counter[int](), Counter[int]()
    for event in events:
        if isinstance(event, Expanded):
            expanded[event.round] += 1
        elif isinstance(event, Finished):
            finished[event.round] += 1
    remaining = width
    for number in range(1, outcome.stats.rounds + 1):
        assert planned[number] == expanded[number] == remaining
        remaining -= finished[number]
    assert len(outcome.tree.finished()) == width - remaining
    assert list(outcome.tree.leaves()) == []
    assert remaining == 0 or outcome.stop_reason in (StopReason.WIDTH_SPENT, StopReason.DEPTH)


@ALL
@settings(max_examples=10)
@given(width=st.integers(1, 40), seed=st.integers(0, 2**63 - 1), coarse=st.integers(1, 5))
async def test_what_is_pruned_is_never_expanded(
    policy: PolicyName, width: int, seed: int, coarse: int
) -> None:
    """An open node grows once, at the level below its parent's; a pruned one never."""
    outcome, _ = await watch(rough(10, 20, coarse), policy, width, seed)
    for node in outcome.tree.nodes:
        if node.state is NodeState.PRUNED:
            assert node.children == []
        assert [outcome.tree[c].child for c in node.children] == list(range(len(node.children)))
        if node.children:
            assert node.children[-1] - node.children[0] == len(node.children) - 1
