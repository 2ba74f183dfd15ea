"""The most tokens that a search may generate, and that no search exceeds it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.policies.registry import POLICIES
from search.spec import PolicyName, SearchSpec
from server.limits import most_tokens
from tests.search.scripted_engine import ScriptedEngine, dice, grow


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=10)
@given(
    width=st.integers(1, 12),
    branch=st.integers(1, 5),
    expansions=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
async def test_no_search_comes_to_more_than_the_estimate(
    policy: PolicyName, width: int, branch: int, expansions: int, seed: int
) -> None:
    """Policies that go back are bounded by their expansions, not by their depth."""
    spec = SearchSpec(
        policy=policy,
        width=width,
        branch=branch,
        expansions=expansions,
        seed=seed,
        max_depth=4,
        max_step_tokens=9,
    )
    outcome = await grow(
        ScriptedEngine(lambda b: "\n\n" if dice(b.tokens, b.seed) % 3 else f"s{b.seed % 9}\n\n"),
        spec,
    )
    assert outcome.tree.generated_tokens <= most_tokens(spec)


def test_the_estimate_worked_by_hand() -> None:
    """Width 4, depth 3, steps of 10; expansions 7 of 2 each; a smaller budget is the bound."""
    flat = SearchSpec(width=4, max_depth=3, max_step_tokens=10)
    back = SearchSpec(policy="mcts", width=4, expansions=7, branch=2, max_step_tokens=10)
    assert most_tokens(flat) == 4 * 3 * 10
    assert most_tokens(back) == 7 * 2 * 10
    assert most_tokens(back.model_copy(update={"max_tokens": 50})) == 50
