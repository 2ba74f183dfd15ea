"""Outcome models: a finished reply has a reward, its earlier steps have none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from search.controller import search
from search.engine import RewardMissing
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import NodeState
from tests.closing import closing
from tests.runtime.outcome_model import (
    FORMAT,
    QUESTION,
    expected_rewards,
    make_outcome_model,
    trajectories,
)
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

PROMPT = tuple(make_tokenizer().encode(f"<|user|>{QUESTION}<|end|><|assistant|>"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and an outcome model."""
    root = tmp_path_factory.mktemp("models")
    return make_checkpoint(root / "policy"), make_outcome_model(root / "outcome")


def options(folders: tuple[Path, Path], form: str = FORMAT) -> EngineOptions:
    """One thread, room for all."""
    return EngineOptions(*folders, form, prm_kv_tokens=4000, batch_limit=8, threads=1)


@pytest.mark.slow
@pytest.mark.promise(
    "An outcome model rewards the whole finished reply, with the value that transformers gives."
)
async def test_rewards_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """Replies of one to eight steps, each read whole, have the sigmoid of transformers' score."""
    async with closing(await EmbeddedEngine.start(options(folders))) as engine:
        rewards = await engine.score("oak", PROMPT, QUESTION, trajectories())
        able = engine.capabilities
    assert able.scores
    assert able.outcome
    assert rewards == pytest.approx(expected_rewards(folders[1]), abs=1e-5)
    assert len(set(rewards)) == 8
    reference = ReferenceEngine(ReferenceOptions(*folders, FORMAT))
    read = await reference.score("oak", PROMPT, QUESTION, trajectories())
    assert read == pytest.approx(rewards, abs=1e-5)


@pytest.mark.slow
async def test_scores_that_would_all_be_one_can_be_scaled(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A format with ``scale`` divides the scores first, since rewards are rounded to 1e-4."""
    file = tmp_path / "softer.json"
    file.write_text(json.dumps({"extends": FORMAT, "scale": 8.0}))
    async with closing(await EmbeddedEngine.start(options(folders, str(file)))) as engine:
        rewards = await engine.score("oak", PROMPT, QUESTION, trajectories())
    assert rewards == pytest.approx(expected_rewards(folders[1], 8.0), abs=1e-5)


@pytest.mark.slow
@pytest.mark.promise(
    "With an outcome model `best_of_n` chooses the finished reply with the highest reward, and a "
    "policy that compares steps is refused."
)
async def test_the_best_of_n_is_the_one_with_the_highest_score(
    folders: tuple[Path, Path],
) -> None:
    """Only finished replies are scored, and policies that compare steps are refused."""
    spec = SearchSpec(
        policy="best_of_n", width=4, seed=3, vote="best_last", max_step_tokens=6, max_depth=3
    )
    about = {"answer_of": lambda text: text, "clock": lambda: 0.0}
    problem, beam = Problem(PROMPT, QUESTION), spec.model_copy(update={"policy": "beam"})
    async with closing(await EmbeddedEngine.start(options(folders))) as engine:
        outcome = await search(problem, spec, engine, tree_id="oak", **about)
        with pytest.raises(RewardMissing) as refused:
            await search(problem, beam, engine, tree_id="elm", **about)
    finished = {node.id for node in outcome.tree.finished()}
    scored = {node.id for node in outcome.tree.nodes if node.reward is not None}
    assert len(finished) == 4
    assert scored == finished
    assert all(node.state is NodeState.FINISHED for node in outcome.tree.finished())
    assert outcome.chosen is not None
    best = max(outcome.tree[node].reward or 0.0 for node in finished)
    assert outcome.tree[outcome.chosen].reward == best
    assert str(refused.value) == (
        "search.policy: 'beam' needs a reward for each step, and the reward model scores finished "
        "replies alone; one of best_of_n, self_consistency is needed"
    )
