"""Best-first search in the DPTS manner, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from search.policies.best_first import BestFirst
from search.policies.policy import Round
from search.policies.visit_counts import VisitCounts
from search.spec import SearchSpec, StopReason
from search.tree import Finish, NodeState, Tree
from tests.search.trees import END, LIMIT, STEP, row, tree_of

C = 1 / sqrt(2)
ONE = BestFirst(64, parallel=1)


def visits_of(tree: Tree) -> VisitCounts:
    """The visit counts of a tree for best-first search."""
    return VisitCounts.of(tree, "best_first", lambda node: node.state is NodeState.FINISHED, 1)


def test_the_dials_come_from_the_spec() -> None:
    """DPTS's own values are the defaults."""
    assert BestFirst.from_spec(SearchSpec(width=7)) == BestFirst(7, 3, 4, 64, 0.8, 0.8, 5, C)
    spec = SearchSpec(
        width=7,
        branch=2,
        parallel=3,
        expansions=9,
        early_stop=0.1,
        deep_seek=0.2,
        enough_answers=1,
        exploration=0.0,
    )
    assert BestFirst.from_spec(spec) == BestFirst(7, 2, 3, 9, 0.1, 0.2, 1, 0.0)


def test_it_begins_at_the_root() -> None:
    """The root gets ``branch`` children, or the width if that is less."""
    assert BestFirst(64).plan(tree_of()) == Round({0: 3})
    assert BestFirst(2).plan(tree_of()) == Round({0: 2})


def test_the_path_goes_on_and_the_rest_of_the_round_explores() -> None:
    """1 is the best child; 2 is worth c * sqrt(1 + 2) * 0.6 / 2, 3 the same with 0.5.

    N of the root is 1 plus the virtual visit on the way to 1.
    """
    tree = row(0.9, 0.6, 0.5)
    assert ONE.plan(tree) == Round({1: 3})
    assert BestFirst(64, parallel=2).plan(tree) == Round({1: 3, 2: 3})
    visits = visits_of(tree)
    visits.pass_through(tree[1])
    policy = BestFirst(64)
    assert policy.score(visits, tree[2]) == pytest.approx(C * sqrt(3) * 0.6 / 2)
    assert policy.score(visits, tree[3]) == pytest.approx(C * sqrt(3) * 0.5 / 2)


@pytest.mark.promise(
    "Best-first search expands its leaves in the order that it announces to the engine."
)
@pytest.mark.parametrize("rewards", [(0.9, 0.6, 0.5), (0.2, 0.2, 0.2), (0.1, 0.9)])
def test_a_round_is_the_front_of_the_outlook(rewards: tuple[float, ...]) -> None:
    """A round of any number of leaves takes the first ones of the expansion order."""
    tree = row(*rewards)
    ahead = [node.id for node in BestFirst(64).expansion_order(tree)]
    assert sorted(ahead) == [leaf.id for leaf in tree.leaves()]
    for parallel in range(1, len(rewards) + 1):
        plan = BestFirst(64, parallel=parallel).plan(tree)
        assert plan is not None
        assert list(plan.expand) == ahead[:parallel]


def test_a_tie_goes_to_the_lower_id() -> None:
    """Of four equal leaves the first goes on, the second and third are explored."""
    assert BestFirst(64, 4, 3).plan(row(0.5, 0.5, 0.5, 0.5)) == Round({1: 4, 2: 4, 3: 4})


def test_an_exploited_path_stops_early() -> None:
    """1 is the best of its siblings, but its best child has 0.5 < 0.8 * 0.9: back to 2.

    At a share of 0.5 (0.45) the path goes on.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9), (0, "b", STEP, 0.6), (1, "c", STEP, 0.5), (1, "d", STEP, 0.2)
    )
    assert ONE.plan(tree) == Round({2: 3})
    assert replace(ONE, early_stop=0.5, deep_seek=9.0).plan(tree) == Round({3: 3})


def test_an_explored_path_is_taken_deep() -> None:
    """2 is not the best; its best child has 0.6, and 0.8 of the mean of 1 and 2, 0.75, is 0.6.

    At a share of 0.9 (0.675) it does not go on; then 3 is the open leaf with the highest reward.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.6),
        (1, "c", STEP, 0.65),
        (1, "d", END, 0.7),
        (2, "e", STEP, 0.6),
    )
    policy = replace(ONE, early_stop=9.0)
    assert policy.plan(tree) == Round({5: 3})
    assert replace(policy, deep_seek=0.9).plan(tree) == Round({3: 3})


def test_backtracking_prefers_where_answers_were_found() -> None:
    """Three trajectories ended below 1: N of the root is 4, of 2 only 1.

    So 3 (0.4, below the root) is worth c * sqrt(5) * 0.4 / 2 = 0.316 and 4 (0.6, below 2) no more
    than c * sqrt(2) * 0.6 / 2 = 0.3. Without looking back, 4 would come first.
    """
    tree = tree_of(
        (0, "a", STEP, 0.9),
        (0, "b", STEP, 0.9),
        (0, "c", STEP, 0.4),
        (2, "d", STEP, 0.6),
        *((1, f"end {i}", END, 0.9) for i in range(3)),
    )
    visits = visits_of(tree)
    assert (visits.count[0], visits.count[2]) == (4, 1)
    assert ONE.score(visits, tree[3]) == pytest.approx(C * sqrt(5) * 0.4 / 2)
    assert ONE.score(visits, tree[4]) == pytest.approx(C * sqrt(2) * 0.6 / 2)
    assert ONE.plan(tree) == Round({3: 3})


def test_what_was_said_before_comes_last() -> None:
    """2 repeats 1's step: though worth more than 3 it waits until no new leaf is left."""
    tree = tree_of((0, "a", STEP, 0.9), (0, "a", STEP, 0.9), (0, "b", STEP, 0.1))
    assert BestFirst(64, parallel=2).plan(tree) == Round({1: 3, 3: 3})
    assert BestFirst(64, parallel=3).plan(tree) == Round({1: 3, 2: 3, 3: 3})


def test_an_old_leaf_beats_nobody() -> None:
    """One answer is enough, since the only better open leaf repeats the step of a grown one."""
    tree = tree_of(
        (0, "a", STEP, 0.9), (0, "a", STEP, 0.9), (0, "b", END, 0.8), (1, "c", STEP, 0.1)
    )
    assert BestFirst(64, enough=1).stopped(tree) is StopReason.ANSWERED


def test_enough_answers_that_nothing_open_beats() -> None:
    """Two answers are enough: the search goes on only for an open leaf better than the best.

    A trajectory that is cut at the depth does not count as an answer.
    """
    policy = BestFirst(64, enough=2)
    two = ((0, "a", END, 0.7), (0, "b", END, 0.9))
    tree = tree_of(*two, (0, "c", STEP, 0.9))
    assert policy.plan(tree) is None
    assert policy.stopped(tree) is StopReason.ANSWERED
    assert policy.plan(tree_of(*two, (0, "c", STEP, 0.91))) == Round({3: 3})
    assert policy.plan(tree_of(two[0], (0, "b", LIMIT, 0.9), (0, "c", STEP, 0.5))) == Round({3: 3})


def test_a_reward_of_zero_is_a_reward() -> None:
    """With an open leaf of 0 the search stops, with an answer of 0 it goes on; after a step of 0
    the mean is 0, which any path reaches."""
    policy = BestFirst(64, enough=1)
    assert policy.plan(tree_of((0, "a", END, 0.5), (0, "b", STEP, 0.0))) is None
    assert policy.plan(tree_of((0, "a", END, 0.0), (0, "b", STEP, 0.1))) == Round({2: 3})
    assert policy.score(visits_of(row(0.0)), row(0.0)[1]) == 0.0
    assert ONE.plan(
        tree_of((0, "a", STEP, 0.0), (0, "b", STEP, 0.5), (1, "c", STEP, 0.1))
    ) == Round({3: 3})


def test_expansions_are_a_budget() -> None:
    """With two of three spent one leaf more is expanded; with none left there is no plan."""
    tree = tree_of((0, "a", STEP, 0.9), (0, "b", STEP, 0.8), (1, "c", STEP, 0.9))
    assert BestFirst(64, 2, expansions=3).plan(tree) == Round({3: 2})
    policy = BestFirst(64, 2, expansions=2)
    assert policy.plan(tree) is None
    assert policy.stopped(tree) is StopReason.WIDTH_SPENT


def test_the_width_is_never_exceeded() -> None:
    """With one trajectory left the best leaf gets one child; with none left there is no plan."""
    tree = tree_of((0, "a", END, 0.1), (0, "b", STEP, 0.8), (0, "c", STEP, 0.9))
    assert BestFirst(2).plan(tree) == Round({3: 1})
    assert BestFirst(1).plan(tree) is None
    assert BestFirst(1).stopped(tree) is None
    assert BestFirst(2).stopped(tree) is StopReason.WIDTH_SPENT


def test_without_an_open_leaf_the_root_grows_again() -> None:
    """If all three first steps have ended or died the root gets three more."""
    tree = tree_of((0, "a", END, 0.9), (0, "", Finish.EMPTY, None), (0, "c", END, 0.2))
    policy = BestFirst(64)
    assert [node.id for node in policy.frontier(tree)] == [0]
    assert policy.plan(tree) == Round({0: 3})
    assert policy.score(visits_of(tree), tree[0]) == 0.0
