"""Restarts: a hopeless level is pruned, and new first steps are drawn at the root."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch, RewardMissing
from search.events import Event
from search.policies.adaptive import Adaptive
from search.policies.policy import Round
from search.policies.rebase import Rebase
from search.policies.registry import POLICIES
from search.policies.restarts import Restarts
from search.spec import PolicyName, SearchSpec
from search.tree import ROOT, Tree
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.test_width import ROUGH, dead_stay_dead, widths
from tests.search.trees import END, STEP, row, tree_of

ONCE = Restarts(1, 0.1)
WITH_RESTARTS: tuple[PolicyName, ...] = ("rebase", "ets", "ets_kv", "dora", "adaptive")


def rebase(width: int, restarts: Restarts | None) -> Rebase:
    """REBASE at T = .2."""
    return Rebase(width, 0.2, restarts=restarts)


def test_a_hopeless_level_is_given_up() -> None:
    """With rewards of .09 at most three leaves are replaced by three new first steps."""
    assert rebase(3, ONCE).plan(row(0.0, 0.09, 0.0)) == Round({ROOT: 3}, (1, 2, 3))


@pytest.mark.parametrize("best", [0.1, 0.9])
def test_one_step_is_hope_enough(best: float) -> None:
    """With one reward of .1 or more the plan is REBASE's without restarts."""
    plan = rebase(3, ONCE).plan(row(0.0, best, 0.0))
    assert plan == rebase(3, None).plan(row(0.0, best, 0.0))


def test_a_reward_that_is_not_known_is_no_zero() -> None:
    """A missing reward is an error, as without restarts."""
    tree = row(0.0, 0.0, 0.0)
    tree[2].reward = None
    with pytest.raises(RewardMissing, match="node 2 has no reward"):
        rebase(3, ONCE).plan(tree)


def test_so_is_a_trajectory_that_has_ended() -> None:
    """If an ended one has .5 the other place goes below the leaf; with .05 it goes to the root."""
    for reward, expected in ((0.5, 1), (0.05, ROOT)):
        tree = tree_of((0, "a", STEP, 0.0), (0, "b", END, reward))
        plan = rebase(2, ONCE).plan(tree)
        assert plan is not None
        assert plan.expand == {expected: 1}


def test_deeper_levels_start_again_at_the_root_too() -> None:
    """A promising step has only hopeless children: they are pruned, the step itself is not."""
    tree = tree_of(
        (0, "a", STEP, 0.9), (0, "b", STEP, 0.0), (1, "c", STEP, 0.0), (1, "d", STEP, 0.0)
    )
    tree.prune(2)
    assert rebase(2, ONCE).plan(tree) == Round({ROOT: 2}, (3, 4))


def test_after_the_last_restart_a_level_is_dealt_as_ever() -> None:
    """Three first steps were drawn twice and one restart is allowed: the three leaves go on."""
    tree = row(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for node in (1, 2, 3):
        tree.prune(node)
    assert rebase(3, ONCE).plan(tree) == Round({4: 1, 5: 1, 6: 1})
    assert rebase(3, Restarts(2, 0.1)).plan(tree) == Round({ROOT: 3}, (4, 5, 6))
    assert not ONCE.possible(tree, 3)


@pytest.mark.parametrize(("restarts", "plan"), [(None, None), (ONCE, Round({ROOT: 2}))])
def test_a_level_that_died_is_hopeless(restarts: Restarts | None, plan: Round | None) -> None:
    """Both children of the tree's only step were empty or loops: nothing is left to prune."""
    dead = tree_of((0, "a", STEP, 0.9), (0, "b", STEP, 0.0), (1, "", STEP, 0.0), (1, "", STEP, 0.0))
    for node in (2, 3, 4):
        dead.prune(node)
    assert rebase(2, restarts).plan(dead) == plan
    assert Adaptive(3, 1, 1.0, rebase(3, restarts)).plan(_died_beside_a_chain()) == plan


def test_a_reply_with_hope_is_enough_where_the_rest_died() -> None:
    """One of two replies ended with .5 and the other's step died: the search is over."""
    tree = tree_of((0, "a", END, 0.5), (0, "", STEP, 0.0))
    tree.prune(2)
    assert rebase(2, ONCE).plan(tree) is None


def _died_beside_a_chain() -> Tree:
    """Of width 3 one chain, a - b, ended below hope, and the tree's second level died."""
    tree = tree_of(
        *((0, "a", STEP, 0.05), (1, "b", END, 0.0), (0, "x", STEP, 0.9)),
        *((3, "", STEP, 0.0), (3, "", STEP, 0.0)),
    )
    tree.prune(4)
    tree.prune(5)
    return tree


def test_chains_stand_by_again() -> None:
    """Of width 3 one chain, a - b, ended; x is hopeless and so is a: the root gets new steps, and
    the chain's first step is a candidate beside them."""
    chain = [(0, "a", STEP, 0.05), (1, "b", END, 0.0)]
    level = tree_of(*chain, (0, "x", STEP, 0.0))
    adaptive = Adaptive(3, 1, 1.0, rebase(3, ONCE))
    assert adaptive.plan(level) == Round({ROOT: 2}, (3,))
    level.prune(3)
    level.add(ROOT, (1,), "y", STEP).reward = 0.0
    level.add(ROOT, (2,), "z", STEP).reward = 0.9
    assert [node.id for node in adaptive.frontier(level)] == [ROOT, 1, 4, 5]
    assert adaptive.plan(level) == Round({5: 2}, (4,))


@pytest.mark.parametrize("policy", WITH_RESTARTS)
async def test_what_was_not_drawn_at_first_is_found(policy: PolicyName) -> None:
    """Only the seventh first step and later ones are right: width 6 finds it only by a restart."""

    def say(branch: Branch) -> str:
        if branch.parent == ROOT:
            return f"{'right' if branch.child >= 6 else 'wrong'} {branch.child}\n\n"
        return "The answer is 1."

    def reward(texts: Sequence[str]) -> float:
        return 0.9 if texts[0].startswith("right") else 0.01

    spec = SearchSpec(policy=policy, width=6, seed=1, chains=1)
    plain = await grow(ScriptedEngine(say, reward), spec.model_copy(update={"restarts": 0}))
    again = await grow(ScriptedEngine(say, reward), spec.model_copy(update={"restarts": 1}))
    assert "right" not in plain.text
    assert "right" in again.text
    assert len(again.tree.finished()) == len(plain.tree.finished()) == 6


async def test_what_may_start_again_is_not_certain() -> None:
    """One reply ended with .05; the other leaf is pruned for a new first step, which wins."""

    def say(branch: Branch) -> str:
        return ("The answer is 1.", "wrong\n\n", "The answer is 2.")[branch.child]

    def reward(texts: Sequence[str]) -> float:
        return {"The answer is 1.": 0.05, "The answer is 2.": 0.9}.get(texts[0], 0.04)

    fields = {"policy": "rebase", "vote": "best_min", "consensus": "certain", "restarts": 1}
    spec = SearchSpec.model_validate({**fields, "width": 2, "seed": 1})
    assert (await grow(ScriptedEngine(say, reward), spec)).answer == "2"


@settings(max_examples=60)
@given(
    policy=st.sampled_from(WITH_RESTARTS),
    width=st.integers(1, 20),
    restarts=st.integers(0, 4),
    seed=st.integers(0, 2**63 - 1),
    below=st.sampled_from([0.1, 0.5, 1.0]),
    engine=ROUGH,
)
async def test_the_width_and_the_bound_hold(
    policy: PolicyName,
    width: int,
    restarts: int,
    seed: int,
    below: float,
    engine: ScriptedEngine,
) -> None:
    """No more finish than the width, the root's children stay within the bound, no round is wider
    than the width, nothing grows below a node that a hint called dead."""
    spec = SearchSpec(
        policy=policy,
        width=width,
        seed=seed,
        max_depth=6,
        restarts=restarts,
        hopeless_below=below,
    )
    events: list[Event] = []
    tree = (await grow(engine, spec, listen=events.append)).tree
    assert max(widths(events).values()) <= width
    assert len(tree.finished()) <= width
    assert len(tree[ROOT].children) <= width * (1 + restarts)
    dead_stay_dead(engine, tree)


def test_the_defaults() -> None:
    """``adaptive`` starts again twice below .3; the others grow their papers' trees."""
    assert Adaptive.from_spec(SearchSpec(policy="adaptive")).tree_search.restarts == Restarts(2)
    never = SearchSpec(policy="adaptive", restarts=0)
    assert Adaptive.from_spec(never).tree_search.restarts is None
    tree = row(0.0, 0.0, 0.0)
    for name in ("rebase", "ets_kv"):
        plan = POLICIES[name](SearchSpec(policy=name, width=3)).plan(tree)
        assert plan is not None
        assert ROOT not in plan.expand
