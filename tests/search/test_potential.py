"""How many children of a beam may be drawn ahead, by the beam's previous reward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from search.tree_builder import potentials

REWARDS = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=40)


def test_four_bins_by_hand() -> None:
    """B = 4 over rewards from 0.1 to 0.9: bins of 0.2, the top bin may run all four ahead."""
    rewards = [0.9, 0.71, 0.69, 0.5, 0.31, 0.29, 0.1]
    assert potentials(rewards, 4) == [4, 4, 3, 3, 2, 1, 1]


def test_without_a_reward_one_child() -> None:
    """A beam without a reward, such as the root, may run one child ahead."""
    assert potentials([None, None], 8) == [1, 1]
    assert potentials([None, 0.2, 0.8], 2) == [1, 1, 2]
    assert potentials([], 3) == []


@given(REWARDS, st.integers(1, 16))
def test_a_better_beam_may_run_as_many_ahead(rewards: list[float | None], branching: int) -> None:
    """Numbers are from 1 to B and monotone in the reward; the best beam has B."""
    limits = potentials(rewards, branching)
    pairs = [(r, p) for r, p in zip(rewards, limits, strict=True) if r is not None]
    assert all(1 <= p <= branching for p in limits)
    assert all(p <= q for r, p in pairs for s, q in pairs if r <= s)
    if pairs:
        assert max(pairs)[1] == branching
