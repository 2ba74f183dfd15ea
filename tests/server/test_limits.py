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
    restarts=st.sampled_from([None, 0, 1, 3]),
    hopeless=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
async def test_no_search_comes_to_more_than_the_estimate(
    policy: PolicyName,
    width: int,
    branch: int,
    expansions: int,
    restarts: int | None,
    hopeless: float,
    seed: int,
) -> None:
    """Policies that go back are bounded by their expansions, not by their depth; those that restart
    have as many levels again."""
    spec = SearchSpec(
        policy=policy,
        width=width,
        branch=branch,
        expansions=expansions,
        restarts=restarts,
        hopeless_below=hopeless,
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
    assert most_tokens(flat.model_copy(update={"restarts": 2})) == 4 * 4 * 3 * 10
    assert most_tokens(back) == 7 * 2 * 10
    assert most_tokens(back.model_copy(update={"max_tokens": 50})) == 50


async def test_a_tree_that_starts_again_counts_its_levels_again() -> None:
    """Every level of depth 2 is hopeless, so one restart adds its two levels to the three."""
    spec = SearchSpec(width=4, max_depth=3, max_step_tokens=10, restarts=1, seed=0)
    engine = ScriptedEngine(
        lambda b: f"{dice(b.seed) % 10_000:8d}\n\n", lambda steps: 0.9 if len(steps) == 1 else 0.1
    )
    tokens = (await grow(engine, spec)).tree.generated_tokens
    assert tokens == (2 + 3) * 4 * 10
    assert most_tokens(spec.model_copy(update={"restarts": 0})) < tokens <= most_tokens(spec)
