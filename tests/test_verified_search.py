"""The bundled models with a verifier: same seed, same tree if the verifier is pure."""

from __future__ import annotations

import pytest

from models.tasks import TASKS
from runtime.verifiers.stated_arithmetic import has_wrong_equation
from search.controller import search
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import Tree, round_reward
from server.assemble import running
from server.settings import load_settings

ENVIRONMENT = {"HEDGEROW_THREADS": "1", "HEDGEROW_KV_TOKENS": "8192"}
QUESTION = TASKS["game24"].questions("dev", 3, seed=5)[2]
REBASE = SearchSpec(policy="rebase", width=6, seed=1, max_step_tokens=64)
CHAINS = SearchSpec(policy="best_of_n", width=6, seed=1, max_step_tokens=64, vote="best_min")

pytestmark = pytest.mark.slow


async def grow(verifier: str, *specs: SearchSpec, reward_model: str = "auto") -> list[Outcome]:
    """Run the specs on the engine of a server with this verifier and reward model."""
    settings = {"HEDGEROW_VERIFIER": verifier, "HEDGEROW_REWARD_MODEL": reward_model}
    async with running(load_settings(ENVIRONMENT | settings)) as parts:
        prompt = tuple(parts.text.encode_chat([{"role": "user", "content": QUESTION}]))
        return [
            await search(
                Problem(prompt, QUESTION),
                spec,
                parts.engine,
                tree_id=f"oak-{number}",
                answer_of=lambda text: text,
                clock=lambda: 0.0,
            )
            for number, spec in enumerate(specs)
        ]


def factors(tree: Tree) -> list[float]:
    """The bundled verifier's factor for each step of the tree."""
    return [0.0 if has_wrong_equation(node.text) else 1.0 for node in tree.nodes[1:]]


@pytest.mark.promise(
    "A verifier that finds nothing wrong changes no tree, and with a pure verifier the same seed "
    "gives the same tree."
)
async def test_a_factor_changes_the_rewards_and_a_one_changes_nothing() -> None:
    """Chains have the same steps whatever their rewards: with the bundled verifier each reward is
    the reward model's or 0. A verifier that finds nothing wrong changes no digest."""
    plain = await grow("none", REBASE, CHAINS)
    neutral = await grow("tests.runtime.verifier_examples:one", REBASE, CHAINS)
    checked = await grow("arithmetic", REBASE, CHAINS)
    again = await grow("arithmetic", REBASE, CHAINS)
    assert [tree.digest for tree in neutral] == [tree.digest for tree in plain]
    assert [tree.digest for tree in again] == [tree.digest for tree in checked]
    assert all(outcome.reproducible == "exact" for outcome in checked)
    before, after = plain[1].tree, checked[1].tree
    assert [node.tokens for node in after.nodes] == [node.tokens for node in before.nodes]
    expected_factors = factors(after)
    assert 0.0 in expected_factors
    for node, plain_node, factor in zip(
        after.nodes[1:], before.nodes[1:], expected_factors, strict=True
    ):
        assert plain_node.reward is not None
        assert node.reward == round_reward(plain_node.reward * factor)


async def test_alone_its_numbers_are_the_rewards() -> None:
    """Without a reward model the verifier's numbers are the rewards."""
    (outcome,) = await grow("arithmetic", CHAINS, reward_model="none")
    rewards = [node.reward for node in outcome.tree.nodes[1:]]
    assert rewards == factors(outcome.tree)
