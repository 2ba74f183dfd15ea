"""Values and advantages of steps, by hand and as properties of any tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.rollouts import rollout_steps
from search.tree import ROOT, Finish, NodeState, Tree


def test_values_and_advantages_worked_by_hand() -> None:
    """One branch has two trajectories of 0.9 and 0.3, its sibling one of 0.6, a third none.

    The root is worth 1.8 / 3 = 0.6, the first branch (0.9 + 0.3) / 2 = 0.6.
    """
    tree = Tree([7])
    for parent, finish, reward in (
        (ROOT, Finish.STEP, 0.5),  # 1
        (ROOT, Finish.END, 0.6),  # 2
        (ROOT, Finish.STEP, 0.2),  # 3: given up
        (1, Finish.END, 0.9),  # 4
        (1, Finish.LIMIT, 0.3),  # 5
        (1, Finish.EMPTY, None),  # 6: dead at birth
    ):
        tree.add(parent, [len(tree)], "", finish).reward = reward
    tree.prune(3)
    steps = rollout_steps(tree)
    assert [step.node.id for step in steps] == [*range(7)]
    assert [step.trajectories for step in steps] == [3, 2, 1, 0, 1, 1, 0]
    values = [step.value for step in steps]
    assert values == [*map(pytest.approx, (0.6, 0.6, 0.6)), None, 0.9, 0.3, None]
    zero = pytest.approx(0.0)
    advantages = [step.advantage for step in steps]
    assert advantages == [None, zero, zero, None, *map(pytest.approx, (0.3, -0.3)), None]


def test_a_return_that_is_not_known_counts_nowhere() -> None:
    """With another measure one trajectory has no return, and does not count."""
    tree = Tree([7])
    for reward in (0.1, 0.2, 0.3):
        tree.add(ROOT, [1], "", Finish.END).reward = reward
    steps = rollout_steps(tree, lambda _, node: {1: 1.0, 2: None, 3: 0.0}[node.id])
    assert [(s.trajectories, s.value, s.advantage) for s in steps] == [
        (2, 0.5, None),
        (1, 1.0, 0.5),
        (0, None, None),
        (1, 0.0, -0.5),
    ]


@given(st.data())
def test_advantages_add_up_along_a_trajectory(data: st.DataObject) -> None:
    """The sum is the return less the root's value; a value is the mean over its trajectories."""
    tree = Tree([7])
    for _ in range(data.draw(st.integers(1, 30))):
        parent = data.draw(st.sampled_from([n.id for n in tree.nodes if n.state is NodeState.OPEN]))
        finish = data.draw(st.sampled_from([Finish.STEP, Finish.END, Finish.LENGTH, Finish.LIMIT]))
        node = tree.add(parent, [1], "", finish)
        node.reward = data.draw(st.integers(0, 10_000)) / 10_000
    steps = rollout_steps(tree)
    for leaf in tree.finished():
        way = [steps[node.id].advantage or 0.0 for node in tree.chain(leaf.id)]
        root = steps[ROOT].value
        assert root is not None
        assert sum(way) == pytest.approx((leaf.reward or 0.0) - root)
    for node in tree.nodes:
        below = [steps[child] for child in node.children if steps[child].trajectories]
        if below and node.state is NodeState.OPEN:
            total = sum(step.value * step.trajectories for step in below if step.value is not None)
            assert steps[node.id].value == pytest.approx(total / steps[node.id].trajectories)
