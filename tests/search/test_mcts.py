"""PUCT over steps, by hand."""

from __future__ import annotations

from math import sqrt

import pytest

from search.policies.mcts import Mcts
from search.policies.policy import Round
from search.policies.visit_counts import VisitCounts, expansions_below
from search.spec import SearchSpec, StopReason
from search.tree import Finish, Tree
from tests.search.trees import END, STEP, row, tree_of


def small() -> Tree:
    """Three first steps, of which 1 has children; its child 4 has ended."""
    return tree_of(
        (0, "a", STEP, 0.8),
        (0, "b", STEP, 0.4),
        (0, "c", STEP, 0.6),
        (1, "d", END, 0.9),
        (1, "e", STEP, 0.5),
        (1, "f", STEP, 0.7),
    )


def test_the_dials_come_from_the_spec() -> None:
    """c is 1.25 unless the spec says otherwise."""
    assert Mcts.from_spec(SearchSpec(width=7)) == Mcts(7, 3, 4, 64, 1.25)
    spec = SearchSpec(width=7, branch=2, parallel=3, expansions=9, exploration=0.5)
    assert Mcts.from_spec(spec) == Mcts(7, 2, 3, 9, 0.5)


def test_it_begins_at_the_root() -> None:
    """The root gets ``branch`` children, or the width if that is less."""
    assert Mcts(64).plan(tree_of()) == Round({0: 3})
    assert Mcts(2).plan(tree_of()) == Round({0: 2})


def test_values_worked_by_hand() -> None:
    """N of 0 to 3 is 6, 4, 1, 1, Q is 2.9 for 1 (0.8 + 0.9 + 0.5 + 0.7); P is 1/3 and c 1.25.

    1: 2.9/4 + 1.25/3 * sqrt(6)/5 = 0.929; 2: 0.4 + 1.25/3 * sqrt(6)/2 = 0.910; 3: 1.110.
    """
    tree, policy = small(), Mcts(64)
    visits = VisitCounts.of(tree, "mcts", lambda _: True)
    assert visits.count[:4] == [6, 4, 1, 1]
    u = 1.25 / 3 * sqrt(6)
    values = [policy.value(visits, tree[i]) for i in (1, 2, 3)]
    assert values == pytest.approx([2.9 / 4 + u / 5, 0.4 + u / 2, 0.6 + u / 2])
    assert values == pytest.approx([0.929, 0.910, 1.110], abs=1e-3)
    assert Mcts(64, parallel=1).plan(tree) == Round({3: 3})


@pytest.mark.promise(
    "MCTS selects the nodes of a round by the statistics at its start plus virtual visits."
)
def test_virtual_visits_spread_a_round() -> None:
    """After the walk to 3 N of the root is 7: 2 is worth 0.951 and now more than 1, 0.945.

    The third walk cannot take 2 and 3 again and goes below 1, where 6 beats 5.
    """
    assert Mcts(64, parallel=2).plan(small()) == Round({3: 3, 2: 3})
    assert Mcts(64, parallel=3).plan(small()) == Round({3: 3, 2: 3, 6: 3})


def test_the_outlook_is_the_next_round_then_who_is_nearest_to_being_the_best() -> None:
    """After the walk to 3 the best is 2; 1 is 0.006 behind, and so is 6, the better leaf below 1.

    A round of any number of leaves takes the first ones of the expansion order.
    """
    ahead = [node.id for node in Mcts(64, parallel=1).expansion_order(small())]
    assert ahead == [3, 2, 6, 5]
    for parallel in (1, 2, 3):
        policy = Mcts(64, parallel=parallel)
        plan = policy.plan(small())
        assert plan is not None
        assert list(plan.expand) == [node.id for node in policy.expansion_order(small())][:parallel]


def test_walks_that_have_no_room_in_a_round_come_before_new_ones() -> None:
    """Walks to 4 and 3 are under way. Where the root may grow again a walk ends at the root."""
    tree = tree_of(
        (0, "a", STEP, 0.9), (0, "b", STEP, 0.8), (1, "c", STEP, 0.7), (2, "d", STEP, 0.9)
    )
    assert [node.id for node in Mcts(64, 2, 1).expansion_order(tree)] == [4, 3]
    assert [node.id for node in Mcts(64, 2, 1).expansion_order(twice())] == [0, 6]


def test_a_walk_is_played_to_its_end() -> None:
    """The best of the last expansion goes on before a new walk starts, though 2 is worth more."""
    tree = tree_of(
        (0, "a", STEP, 0.5), (0, "b", STEP, 0.9), (1, "c", STEP, 0.1), (1, "d", STEP, 0.2)
    )
    assert Mcts(64, 2, 1).plan(tree) == Round({4: 2})
    assert Mcts(64, 2, 2).plan(tree) == Round({4: 2, 2: 2})


def test_a_walk_under_way_is_a_visit_for_the_next() -> None:
    """3 goes on. Q of 1 is 0.9 + 0.5 + 0.4, so with 3 visits it is worth 0.6 + 0.31, with 4 only
    0.45 + 0.28: the second walk goes to 2, worth 0.2 + 0.70 by then, where 4 would have been next.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9), (0, "b", STEP, 0.2), (1, "c", STEP, 0.5), (1, "d", STEP, 0.4)
    )
    assert Mcts(64, 2, 2).plan(tree) == Round({3: 2, 2: 2})


def test_what_has_ended_is_no_rival_in_the_outlook() -> None:
    """After the walk to 2, 3 is 0.77 + 0.26 - 0.3 - 0.51 = 0.21 behind 1, below which only 5 may
    grow: 5 is next although 4, which has ended, is worth 0.4 more.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.9),
        (0, "c", STEP, 0.3),
        (1, "d", END, 0.9),
        (1, "e", STEP, 0.5),
    )
    assert [node.id for node in Mcts(64, parallel=1).expansion_order(tree)] == [2, 5, 3]


def test_who_stands_below_a_lesser_step_is_as_far_behind() -> None:
    """5 goes on. Else only 6 may grow below 2, the better step, and only 3 below 1, which is
    (2.6/4 + 1.65/5) - (1/3 + 1.65/4) = 0.23 behind.
    """
    tree = tree_of(
        (0, "a", STEP, 0.3),
        (0, "b", STEP, 0.9),
        (1, "c", STEP, 0.1),
        (1, "d", END, 0.6),
        (2, "e", STEP, 0.9),
        (2, "f", STEP, 0.8),
    )
    assert [node.id for node in Mcts(64, 2, 1).expansion_order(tree)] == [5, 6, 3]


@pytest.mark.promise("MCTS selects the lower ids among equal nodes.")
def test_ties_go_to_the_lower_id() -> None:
    """Equal children: the walk under way is 1's, new ones take 2 and 3."""
    tree = row(0.5, 0.5, 0.5, 0.5)
    assert Mcts(64, 4, 3).plan(tree) == Round({1: 4, 2: 4, 3: 4})
    assert [node.id for node in Mcts(64, 4, 1).expansion_order(tree)] == [1, 2, 3, 4]


def test_siblings_that_say_the_same_are_one_move() -> None:
    """1 and 2 are alike: their move has P = 2/3, that of 3 has 1/3; 2 never grows."""
    tree = tree_of((0, "a", STEP, 0.3), (0, "a", STEP, 0.3), (0, "b", STEP, 0.5))
    policy = Mcts(64)
    visits = VisitCounts.of(tree, "mcts", lambda _: True)
    u = 1.25 * sqrt(3) / 2
    values = [policy.value(visits, tree[i]) for i in (1, 3)]
    assert values == pytest.approx([0.3 + 2 / 3 * u, 0.5 + u / 3])
    assert policy.plan(tree) == Round({1: 3, 3: 3})


def twice() -> Tree:
    """Two children an expansion: the root, 1, 2 and 3 have grown; all their last steps ended."""
    return tree_of(
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.8),
        (1, "c", STEP, 0.7),
        (1, "d", END, 0.7),
        (2, "e", END, 0.9),
        (2, "f", STEP, 0.1),
        (3, "g", END, 0.9),
        (3, "h", END, 0.9),
    )


def test_a_node_is_expanded_again_by_the_root_of_what_is_below() -> None:
    """With four expansions at or below it the root may grow a second time; 1, with two, may not.

    A walk ends at the root before another goes down to 6.
    """
    policy = Mcts(64, 2, 1)
    assert [node.id for node in policy.frontier(twice())] == [0, 6]
    assert policy.plan(twice()) == Round({0: 2})
    assert Mcts(64, 2, 2).plan(twice()) == Round({0: 2, 6: 2})


@pytest.mark.parametrize(("steps", "again"), [(6, False), (7, True)])
def test_the_third_expansion_needs_nine(steps: int, again: bool) -> None:
    """One child an expansion: two of the root, and one of each step but the last below 1."""
    below = [(3 + i if i >= 0 else 1, "s", STEP, 0.5) for i in range(-1, steps - 1)]
    tree = tree_of((0, "a", STEP, 0.5), (0, "b", STEP, 0.5), *below)
    assert expansions_below(tree, 1)[0] == 2 + steps
    assert (0 in [node.id for node in Mcts(64, 1).frontier(tree)]) is again


def test_a_walk_never_goes_where_nothing_may_grow() -> None:
    """1 is worth more than 2, but all below it has ended."""
    tree = tree_of((0, "a", STEP, 0.9), (0, "b", STEP, 0.1), (1, "c", END, 0.9), (1, "d", END, 0.9))
    assert Mcts(64, 2, 4).plan(tree) == Round({2: 2})


def test_when_nothing_may_grow_the_root_does() -> None:
    """If everything has ended or died the root gets another expansion."""
    tree = tree_of((0, "a", END, 0.9), (0, "", Finish.EMPTY, None))
    assert [node.id for node in Mcts(64, 2).frontier(tree)] == [0]
    assert Mcts(64, 2).plan(tree) == Round({0: 2})


def test_width_and_expansions_are_budgets() -> None:
    """With one trajectory left there is one child; with no expansion left there is no plan."""
    assert Mcts(2, 3).plan(small()) == Round({3: 1})
    assert Mcts(1).plan(small()) is None
    assert Mcts(1).stopped(small()) is None
    assert Mcts(2).stopped(small()) is StopReason.WIDTH_SPENT
    exhausted = Mcts(64, expansions=2)
    assert exhausted.plan(small()) is None
    assert exhausted.stopped(small()) is StopReason.WIDTH_SPENT
    assert Mcts(64, expansions=3).plan(small()) == Round({3: 3})
