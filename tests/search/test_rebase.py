"""REBASE's allocation, worked by hand and against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.policies.policy import Round
from search.policies.rebase import Rebase, allocate
from search.tree import Tree
from tests.search.trees import END, STEP, row, tree_of


@pytest.mark.parametrize(
    ("rewards", "total", "temperature", "shares"),
    [
        # e^0, e^-2, e^-4 = 1, 0.13534, 0.01832: 16/1.15365 = 13.87 -> 14; 2*0.8808 = 1.76 -> 2
        pytest.param([0.9, 0.5, 0.1], 16, 0.2, [14, 2, 0], id="three"),
        # the same rewards at T = 1: 1, 0.67032, 0.44933: 16/2.11965 = 7.55 -> 8;
        # 8*0.67032/1.11965 = 4.79 -> 5; 3
        pytest.param([0.9, 0.5, 0.1], 16, 1.0, [8, 5, 3], id="warmer"),
        # e^-0.5 = 0.60653 twice: 10/2.21306 = 4.52 -> 5; 5/2 = 2.5 -> 3; 2
        pytest.param([0.8, 0.7, 0.7], 10, 0.2, [5, 3, 2], id="tie behind the best"),
        # differences of 0.1 at T = 0.001: e^-100 is no rival
        pytest.param([0.6, 0.5, 0.4], 5, 0.001, [5, 0, 0], id="cold"),
        # at T = 0.0001 e^-9000 underflows to zero; still everything is given out
        pytest.param([1.0, 0.1, 0.0], 5, 0.0001, [5, 0, 0], id="underflow"),
    ],
)
def test_shares_worked_by_hand(
    rewards: list[float], total: int, temperature: float, shares: list[int]
) -> None:
    """Equation (1): W_i = ceil(N_i e^(R_i/T) / sum over the unserved of e^(R_k/T))."""
    assert allocate(rewards, total, temperature) == shares


@pytest.mark.promise(
    "REBASE allocates children by ceil(x - 1e-9) in float64, so that rounding noise adds no child."
)
def test_rounding_noise_does_not_buy_a_child() -> None:
    """Integer shares stay integers: plain float arithmetic turns these 4 over 4 into 2, 1, 1, 0.

    The best takes ceil(25/(1 + 4e^-3)) = ceil(20.85) = 21; four equal nodes share the other 4.
    Of 18 the best of four takes ceil(18/(1 + 3e^-1)) = ceil(8.56) = 9; a third of the other 9 comes
    out as 3 + 4e-16, which is 3 and not 4.
    """
    rewards, total, temperature = [0.9, 0.3, 0.3, 0.3, 0.3], 25, 0.2
    assert _plain(rewards, total, temperature) == [21, 2, 1, 1, 0]
    assert allocate(rewards, total, temperature) == [21, 1, 1, 1, 1]
    third = exp((0.7 - 0.9) / 0.2)
    assert 9 * (third / (third + third + third)) > 3
    assert allocate([0.9, 0.7, 0.7, 0.7], 18, 0.2) == [9, 3, 3, 3]


def _plain(rewards: list[float], total: int, temperature: float) -> list[int]:
    """The formula with running subtraction and no tolerance."""
    weights = [exp((r - rewards[0]) / temperature) for r in rewards]
    rest, shares = sum(weights), []
    for weight in weights:
        share = ceil(total * weight / rest) if total else 0
        shares.append(share)
        total, rest = total - share, rest - weight
    return shares


rewards_of_a_level = st.lists(st.integers(0, 10_000).map(lambda i: i / 10_000), min_size=1)


@given(rewards_of_a_level, st.integers(1, 1024), st.sampled_from([0.05, 0.2, 1.0]))
def test_shares_follow_exact_arithmetic(rewards: list[float], total: int, temp: float) -> None:
    """Shares add up to the total, never rise as rewards fall, and are those of exact fractions."""
    rewards.sort(reverse=True)
    shares = allocate(rewards, total, temp)
    assert sum(shares) == total
    assert shares == sorted(shares, reverse=True)
    weights = [Fraction(exp((r - rewards[0]) / temp)) for r in rewards]
    for i, share in enumerate(shares):
        exact = total * weights[i] / sum(weights[i:]) if total else Fraction(0)
        assert share == ceil(exact - Fraction(1, 10**9))
        total -= share


def test_plan_serves_by_reward_and_prunes_what_gets_nothing() -> None:
    """Nodes 1, 2, 3 with rewards 0.1, 0.9, 0.5 share 16 as 0, 14, 2."""
    plan = Rebase(16, 0.2).plan(row(0.1, 0.9, 0.5))
    assert plan == Round({2: 14, 3: 2}, (1,))
    assert Rebase(2, 0.2).plan(row(0.1, 0.9, 0.2)) == Round({2: 2}, (1, 3))


def test_a_reward_of_zero_is_a_reward() -> None:
    """Weights e^0 and e^-2 = 0.13534: 16/1.13534 = 14.09 -> 15, and the other leaf gets 1."""
    assert Rebase(16, 0.2).plan(row(0.0, 0.4)) == Round({2: 15, 1: 1})


@pytest.mark.promise("REBASE gives children left over among equal rewards to the lower ids.")
def test_ties_go_to_the_lower_id() -> None:
    """Of three equal nodes that share 8, the last one gets the smaller share."""
    plan = Rebase(8, 0.2).plan(row(0.5, 0.5, 0.5))
    assert plan == Round({1: 3, 2: 3, 3: 2})


def test_width_shrinks_by_finished_trajectories() -> None:
    """Two of width 8 have finished: the open two share 6; a finished one is no candidate."""
    tree = tree_of((0, "a", END, 0.9), (0, "b", STEP, 0.5), (0, "c", STEP, 0.5), (0, "d", END, 0.1))
    assert Rebase(8, 0.2).plan(tree) == Round({2: 3, 3: 3})


def crowd() -> Tree:
    """Four twins ``a`` (1 to 4) and one ``b`` (5), all of reward .5."""
    return tree_of(*[(0, "a", STEP, 0.5)] * 4, (0, "b", STEP, 0.5))


@pytest.mark.parametrize(
    ("mass", "plan"),
    [
        # as in the paper: five equal leaves share 10
        pytest.param(1.0, Round({1: 2, 2: 2, 3: 2, 4: 2, 5: 2}), id="every leaf"),
        # 4^.5 : 1 = 2 : 1 of 10: ceil(6.67) = 7, and 3
        pytest.param(0.5, Round({1: 7, 5: 3}, (2, 3, 4)), id="the root of it"),
        pytest.param(0.0, Round({1: 5, 5: 5}, (2, 3, 4)), id="distinct steps"),
    ],
)
def test_mass_by_hand(mass: float, plan: Round) -> None:
    """With mass below 1 twins count as one leaf, whose children go to the lowest id."""
    assert Rebase(10, 0.2, mass).plan(crowd()) == plan


def test_mass_and_reward_multiply() -> None:
    """Four of .5 against one of .7 at T = .2: 4^.5 e^-1 = .7358 to 1; 10/1.7358 = 5.76 -> 6."""
    tree = tree_of(*[(0, "a", STEP, 0.5)] * 4, (0, "b", STEP, 0.7))
    assert Rebase(10, 0.2, 0.5).plan(tree) == Round({5: 6, 1: 4}, (2, 3, 4))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 40), st.floats(0, 0.9))
def test_mass_spends_the_width(steps: list[int], width: int, mass: float) -> None:
    """With any twins exactly the width is spent, and no two twins get children."""
    tree = tree_of(*((0, f"{step}", STEP, step / 4) for step in steps))
    plan = Rebase(width, 0.2, mass).plan(tree)
    assert plan is not None
    assert sum(plan.expand.values()) == width
    assert len({tree[node].tokens for node in plan.expand}) == len(plan.expand)
    assert sorted([*plan.expand, *plan.prune]) == [node.id for node in tree.leaves()]


def test_the_floor_by_hand() -> None:
    """At depth 1, a floor level, 14, 2, 0 becomes 13, 2, 1; deeper nothing changes."""
    assert Rebase(16, 0.2, floor_levels=1).plan(row(0.9, 0.5, 0.1)) == Round({1: 13, 2: 2, 3: 1})
    below = tree_of(
        (0, "r", STEP, 0.5), *((1, s, STEP, r) for s, r in zip("abc", (0.9, 0.5, 0.1), strict=True))
    )
    assert Rebase(16, 0.2, floor_levels=1).plan(below) == Round({2: 14, 3: 2}, (4,))


def test_the_floor_is_for_paths_not_for_leaves() -> None:
    """A floor needs one child for two twins. Without a floor 4 places give both a 2 each."""
    tree = tree_of((0, "a", STEP, 0.9), (0, "a", STEP, 0.9), (0, "b", STEP, 0.1))
    assert Rebase(4, 0.2).plan(tree) == Round({1: 2, 2: 2}, (3,))
    assert Rebase(4, 0.2, floor_levels=1).plan(tree) == Round({1: 2, 2: 1, 3: 1})


def test_a_floor_that_is_too_dear_is_for_the_best() -> None:
    """With two children for three paths the better two get one each."""
    assert Rebase(2, 0.2, floor_levels=1).plan(row(0.1, 0.9, 0.0)) == Round({2: 1, 1: 1}, (3,))


@given(rewards_of_a_level, st.integers(1, 60))
def test_with_a_floor_nobody_is_given_up_who_need_not_be(rewards: list[float], width: int) -> None:
    """As many leaves get children as the width allows, and the width is spent."""
    plan = Rebase(width, 0.05, floor_levels=1).plan(row(*rewards))
    assert plan is not None
    assert len(plan.expand) == min(width, len(rewards))
    assert sum(plan.expand.values()) == width
