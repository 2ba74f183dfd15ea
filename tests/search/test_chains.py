"""Independent chains: best of N and self-consistency."""

from __future__ import annotations

import pytest

from search.policies.best_of_n import BestOfN
from search.policies.policy import Policy, Round, Scores
from search.policies.self_consistency import SelfConsistency
from search.tree import Finish
from tests.search.trees import END, STEP, row, tree_of

CHAINS = pytest.mark.parametrize("policy", [BestOfN, SelfConsistency])


@CHAINS
def test_every_chain_goes_on_by_one_step(policy: type[BestOfN | SelfConsistency]) -> None:
    """The root gets the width in children; then each open leaf gets one, whatever its reward."""
    assert policy(3).plan(tree_of()) == Round({0: 3})
    assert policy(3).plan(row(0.1, None, 0.9)) == Round({1: 1, 2: 1, 3: 1})


@CHAINS
def test_a_dead_chain_leaves_its_share_to_the_others(
    policy: type[BestOfN | SelfConsistency],
) -> None:
    """Of five chains one died empty, one has ended: three leaves share four, low ids first."""
    lines = [(0, "a", STEP, None)] * 3
    tree = tree_of(*lines, (0, "\n\n", Finish.EMPTY, None), (0, "z", END, None))
    assert policy(5).plan(tree) == Round({1: 2, 2: 1, 3: 1})


def test_what_they_have_scored() -> None:
    """Best of N needs the rewards of finished replies, self-consistency none at all."""
    policies: tuple[Policy, Policy] = BestOfN(2), SelfConsistency(2)
    assert [policy.scores for policy in policies] == [Scores.FINISHED, Scores.NONE]
