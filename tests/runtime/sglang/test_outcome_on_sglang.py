"""An outcome model on a launched SGLang embedding server, in SGLang's own class for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from search.controller import search
from search.engine import RewardMissing
from search.problem import Problem
from search.spec import SearchSpec
from server.assemble import running
from server.settings import load_settings
from tests.runtime.outcome_model import (
    FORMAT,
    QUESTION,
    expected_rewards,
    make_outcome_model,
    trajectories,
)
from tests.runtime.sglang.support import LAUNCH, ON_SERVERS, SharedServers
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

pytestmark = [*ON_SERVERS, pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module")]

PROMPT = tuple(make_tokenizer().encode(f"<|user|>{QUESTION}<|end|><|assistant|>"))


async def test_rewards_are_those_of_transformers(tmp_path: Path, yard: SharedServers) -> None:
    """Rewards of replies with up to eight steps agree to 1e-4; best-of-4 runs by them, and a policy
    that compares steps is refused."""
    await yard.rest()
    outcome_model = make_outcome_model(tmp_path / "outcome")
    environment = {
        "HEDGEROW_POLICY_MODEL": str(make_checkpoint(tmp_path / "policy", "qwen3")),
        "HEDGEROW_REWARD_MODEL": str(outcome_model),
        "HEDGEROW_LAUNCH_MEMORY": "0.3,0.3",
        "HEDGEROW_KV_TOKENS": "4000",
        "HEDGEROW_PRM_KV_TOKENS": "4000",
    }
    settings = load_settings(LAUNCH | environment)
    assert settings.reward_format == FORMAT
    best = SearchSpec(policy="best_of_n", width=4, seed=3, max_step_tokens=6, max_depth=2)
    beam = best.model_copy(update={"policy": "beam"})
    problem = Problem(PROMPT, QUESTION)
    about = {"answer_of": lambda text: text, "clock": lambda: 0.0}
    async with running(settings) as parts:
        rewards = await parts.engine.score("oak", PROMPT, QUESTION, trajectories())
        await parts.engine.release("oak")
        outcome = await search(problem, best, parts.engine, tree_id="elm", **about)
        with pytest.raises(RewardMissing, match=r"search\.policy: 'beam' needs a reward for each"):
            await search(problem, beam, parts.engine, tree_id="ash", **about)
    assert rewards == pytest.approx(expected_rewards(outcome_model), abs=1e-4)
    assert [node.reward is not None for node in outcome.tree.finished()] == [True] * 4
