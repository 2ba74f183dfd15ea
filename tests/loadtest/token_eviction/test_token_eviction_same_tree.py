"""With room for everything, or with rehydration, token eviction grows the reference's trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.token_eviction.token_eviction_policies import STREAMS
from tests.loadtest.token_eviction.support import PROMPT, SPECS, grow, reference, token_eviction
from tests.runtime.tiny_models import ARCHITECTURES, make_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_every_architecture_grows_the_references_tree(name: str, tmp_path: Path) -> None:
    """Same noise gives the same tree: with biases, head norms, windows, scaled rotations."""
    checkpoint = make_checkpoint(tmp_path / name, name)
    expected = await grow(reference(checkpoint), SPECS["best_first"])
    assert (await grow(token_eviction(checkpoint, "extractive"), SPECS["best_first"])).digest == (
        expected.digest
    )


@pytest.mark.promise(
    "Token eviction grows the reference engine's trees when the budget has room for everything."
)
@pytest.mark.parametrize("policy", ["best_first", pytest.param("mcts", marks=pytest.mark.slow)])
async def test_with_room_for_everything_the_tree_is_the_references(
    llama: Path, policy: str
) -> None:
    """Under every kind of policy nothing is evicted, so the tree is the reference's."""
    expected = await grow(reference(llama), SPECS[policy])
    for kv_policy in ("extractive", "extractive_never", *STREAMS):
        outcome = await grow(token_eviction(llama, kv_policy), SPECS[policy])
        assert outcome.digest == expected.digest, kv_policy
        assert outcome.stats.engine.rehydrations == 0


@pytest.mark.promise(
    "Token eviction with rehydration grows the same tree in a budget of one path as with room for"
    " everything."
)
@pytest.mark.parametrize("policy", ["best_first", pytest.param("mcts", marks=pytest.mark.slow)])
async def test_in_little_room_rehydration_keeps_the_tree(llama: Path, policy: str) -> None:
    """In a budget of one path and its step the tree stays the same with rehydration, and changes
    without."""
    spec = SPECS[policy]
    full = await grow(token_eviction(llama, "extractive"), spec)
    budget = len(PROMPT) + spec.max_depth * spec.max_step_tokens
    assert budget < 0.4 * full.stats.engine.kv_tokens_peak
    rehydrated = await grow(token_eviction(llama, "extractive", budget), spec)
    never = await grow(token_eviction(llama, "extractive_never", budget), spec)
    assert rehydrated.digest == full.digest != never.digest
    assert rehydrated.stats.engine.rehydrations > 0 == never.stats.engine.rehydrations
    for outcome in (rehydrated, never):
        assert outcome.stats.engine.kv_tokens_peak <= budget


@pytest.mark.slow
async def test_streams_lose_what_a_path_has_given_up(llama: Path) -> None:
    """Keeping 0.3 of each stream gives another tree in any budget, and nothing is recomputed."""
    full = await grow(token_eviction(llama, "extractive"), SPECS["best_first"])
    digests = set()
    for kv_policy in STREAMS:
        outcome = await grow(token_eviction(llama, kv_policy, share=0.3), SPECS["best_first"])
        assert outcome.stats.engine.rehydrations == 0
        assert outcome.stats.engine.kv_tokens_peak < full.stats.engine.kv_tokens_peak
        digests.add(outcome.digest)
    assert full.digest not in digests
    assert len(digests) == len(STREAMS)
