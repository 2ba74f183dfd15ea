"""Adaptive: chains that agree end the search; others seed a tree search and vote with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch
from search.events import Event
from search.policies.adaptive import Adaptive
from search.policies.policy import AnswerPolicy, BacktrackingPolicy, Round, frontier_of
from search.policies.rebase import Rebase
from search.policies.restarts import Restarts
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Finish
from search.tree_json import from_json, to_json
from tests.search.scripted_engine import ScriptedEngine, decode, grow
from tests.search.test_width import ROUGH, dead_stay_dead, widths
from tests.search.trees import END, STEP, tree_of


def policy(width: int, chains: int, agreement: float = 1.0) -> Adaptive:
    """The policy with REBASE at T = .2."""
    return Adaptive(width, chains, agreement, Rebase(width, 0.2))


def test_the_default_is_the_rounded_up_root() -> None:
    """64 has 8 chains, 16 and 10 have 4, 1 has 1; there are never more than the width."""
    for width, chains in ((64, 8), (16, 4), (10, 4), (2, 2), (1, 1)):
        spec = SearchSpec(policy="adaptive", width=width)
        assert Adaptive.from_spec(spec).chains == chains
    adaptive = Adaptive.from_spec(SearchSpec(policy="adaptive", width=3, chains=9, agreement=0.6))
    assert adaptive == Adaptive(3, 3, 0.6, Rebase(3, 0.2, restarts=Restarts(2)))
    assert isinstance(adaptive, BacktrackingPolicy)
    assert isinstance(adaptive, AnswerPolicy)


def test_chains_go_on_alone() -> None:
    """At width 6 two chains start at the root, then get a step each for any rewards."""
    assert policy(6, 2).plan(tree_of()) == Round({ROOT: 2})
    tree = tree_of((0, "a", STEP, 0.9), (0, "b", STEP, 0.0))
    assert policy(6, 2).plan(tree) == Round({1: 1, 2: 1})
    half_ended = tree_of((0, "a", STEP, 0.9), (0, "b", END, 0.0))
    assert policy(6, 2).plan(half_ended) == Round({1: 1})


def test_a_tree_worked_by_hand() -> None:
    """Two finished chains, a - c and b - d, disagree. Of width 6 four places are left.

    The chains' first steps are candidates; two more are drawn at the root, x and y. All four at
    depth 1: x .9, a .5, b .5, y .1; REBASE of 4 at T = .2: x ceil(4/1.289) = 4. At T = 1 instead:
    weights 1, .670, .670, .449 of 2.790: ceil(1.43) = 2, ceil(2*.670/1.790) = 1, 1, 0.
    """
    chains = [(0, "a", STEP, 0.5), (0, "b", STEP, 0.5), (1, "c", END, 0.8), (2, "d", END, 0.7)]
    adaptive = Adaptive(6, 2, 1.0, Rebase(6, 1.0))
    assert adaptive.plan(tree_of(*chains)) == Round({ROOT: 2})
    level = tree_of(*chains, (0, "x", STEP, 0.9), (0, "y", STEP, 0.1))
    assert [node.id for node in adaptive.frontier(level)] == [1, 2, 5, 6]
    assert adaptive.plan(level) == Round({5: 2, 1: 1, 2: 1}, (6,))
    next_level = tree_of(
        *chains,
        (0, "x", STEP, 0.9),
        (0, "y", STEP, 0.1),
        (1, "e", END, 0.9),
        (2, "f", STEP, 0.4),
        (5, "g", END, 0.2),
        (5, "h", Finish.EMPTY, None),
    )
    next_level.prune(6)
    assert [node.id for node in adaptive.frontier(next_level)] == [8]
    assert adaptive.plan(next_level) == Round({8: 2})


def test_a_chains_steps_are_candidates_at_their_depth() -> None:
    """One finished chain a - b - c - d of width 3: x is drawn beside a, then y below x beside b."""
    chain = [(0, "a", STEP, 0.5), (1, "b", STEP, 0.5), (2, "c", STEP, 0.5), (3, "d", END, 0.5)]
    tree = tree_of(*chain, (0, "x", STEP, 0.5))
    assert policy(3, 1).plan(tree_of(*chain)) == Round({ROOT: 1})
    assert policy(3, 1).plan(tree) == Round({1: 1, 5: 1})
    deeper = tree_of(*chain, (0, "x", STEP, 0.5), (1, "e", STEP, 0.1), (5, "y", STEP, 0.1))
    # b .5 against .1 and .1 for 2 places: e^-2 is little: ceil(1.57) = 2
    assert policy(3, 1).plan(deeper) == Round({2: 2}, (6, 7))
    assert [node.id for node in policy(3, 1).frontier(deeper)] == [2, 3, 6, 7]


def test_what_is_passed_over_of_a_chain_stays_open_and_is_left_behind() -> None:
    """Only leaves are pruned, so an inner step of a chain that gets no child stays open."""
    chain = [(0, "a", STEP, 0.0), (1, "b", STEP, 0.0), (2, "c", END, 0.5)]
    tree = tree_of(*chain, (0, "x", STEP, 1.0))
    assert policy(3, 1).plan(tree) == Round({4: 2})


def test_enough_seeds_need_no_new_first_steps() -> None:
    """With three chains two places go to the chains' first steps at once."""
    chains = [(0, t, STEP, r) for t, r in (("a", 0.9), ("b", 0.1), ("c", 0.1))]
    ends = [(i, "z", END, 0.5) for i in (1, 2, 3)]
    tree = tree_of(*chains, *ends)
    assert policy(5, 3).plan(tree) == Round({1: 2})
    after = tree_of(*chains, *ends, (1, "d", STEP, 0.5), (1, "e", END, 0.5))
    assert policy(5, 3).plan(after) == Round({7: 1})


def test_a_dead_chain_takes_its_place_along() -> None:
    """Of width 4 with two chains, one of them dead, two places are left, both new at the root."""
    tree = tree_of((0, "a", END, 0.5), (0, "", Finish.EMPTY, None))
    assert policy(4, 2).plan(tree) == Round({ROOT: 2})
    over = tree_of(
        (0, "a", END, 0.5), (0, "", Finish.EMPTY, None), (0, "x", END, 0.1), (0, "y", END, 0.1)
    )
    assert policy(4, 2).plan(over) is None


@pytest.mark.parametrize(
    ("answers", "agreement", "agreed"),
    [
        ("111", 1.0, True),
        ("112", 1.0, False),
        ("112", 0.66, True),
        ("112", 0.67, False),
        ("11-", 1.0, False),  # a chain without an answer agrees with none
        ("1", 1.0, False),  # one chain is no majority
    ],
)
def test_agreement_by_hand(answers: str, agreement: float, agreed: bool) -> None:
    """Agreement is the share of all chains that have the commonest answer."""
    tree = tree_of(*((0, answer, END, 0.5) for answer in answers))
    classes = {a: [n for n in tree.finished() if n.text == a] for a in set(answers) - {"-"}}
    adaptive = policy(8, len(answers), agreement)
    assert (adaptive.plan_knowing(tree, classes) is None) == agreed
    assert adaptive.plan(tree) is not None


async def test_chains_that_agree_are_all_there_is() -> None:
    """Four equal chains of width 16 end the search; with one different answer a tree is grown."""
    spec = SearchSpec(policy="adaptive", width=16, seed=1)
    outcome = await grow(ScriptedEngine(lambda b: "The answer is 1."), spec)
    assert outcome.stop_reason is StopReason.ANSWERED
    assert len(outcome.tree.finished()) == 4
    assert (outcome.answer, outcome.stats.rounds) == ("1", 1)
    doubted = ScriptedEngine(lambda b: f"The answer is {1 + (b.child == 3)}.")
    outcome = await grow(doubted, spec)
    assert outcome.stop_reason is StopReason.ANSWERED
    assert len(outcome.tree.finished()) == 16
    assert [answer.count for answer in outcome.answers] == [15, 1]


async def test_answers_that_are_spelled_differently_agree() -> None:
    """Answers are compared by ``same_answer``, as in the vote."""
    halves = ScriptedEngine(lambda b: f"The answer is {('0.5', '1/2')[b.child % 2]}.")
    spec = SearchSpec(policy="adaptive", width=16, seed=1)
    apart = await grow(halves, spec)
    alike = await grow(halves, spec, same_answer=lambda first, second: True)
    assert (len(apart.tree.finished()), len(alike.tree.finished())) == (16, 4)


def two_steps(branch: Branch) -> str:
    """A first step, then an answer that follows from the branch's place."""
    if "\n\n" in decode(branch.tokens):
        return f"The answer is {branch.seed % 3}."
    return f"s{branch.child}\n\n"


async def test_the_chains_vote_along() -> None:
    """All sixteen trajectories vote, the four chains among them, which are not drawn again."""
    outcome = await grow(ScriptedEngine(two_steps), SearchSpec(policy="adaptive", width=16, seed=2))
    assert sum(answer.count for answer in outcome.answers) == 16
    assert len(outcome.tree[ROOT].children) == 4 + 12 - 4


dials = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "width": st.integers(1, 30),
        "chains": st.none() | st.integers(1, 30),
        "floor_levels": st.integers(0, 2),
        "mass": st.sampled_from([0.0, 0.5, 1.0]),
    }
)


@settings(max_examples=60)
@given(dials=dials, engine=ROUGH)
async def test_whatever_is_said_the_width_holds_and_the_dead_stay_dead(
    dials: dict[str, int], engine: ScriptedEngine
) -> None:
    """No round is wider than the width; nothing grows below a node that a hint called dead; a tree
    read from JSON has the same plan as the original."""
    events: list[Event] = []
    fields = {"policy": "adaptive", "max_depth": 6, **dials}
    outcome = await grow(engine, SearchSpec.model_validate(fields), listen=events.append)
    tree = outcome.tree
    assert len(tree.finished()) <= dials["width"]
    assert max(widths(events).values()) <= dials["width"]
    adaptive = Adaptive.from_spec(outcome.spec)
    assert not tree.above(frontier_of(adaptive, tree)) & dead_stay_dead(engine, tree)
    reloaded = from_json(to_json(tree))
    assert adaptive.plan(reloaded) == adaptive.plan(tree)
    if not any(node.finish.dies_at_birth for node in tree.nodes):
        agreed = len(outcome.answers) == 1
        assert agreed or len(tree.finished()) == dials["width"]
