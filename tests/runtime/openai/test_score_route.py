"""Rewards by another Hedgerow's ``/v1/score``, whatever engine computes them there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.sglang_stub import MortalStub
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.reward_format import local_reward_format
from runtime.text import Text
from search.engine import Capabilities, Trajectory
from search.tree import round_reward
from server.app import create_app
from server.assemble import running
from server.service import create_service
from server.settings import Settings, load_settings
from tests.runtime.mortal_pair import POLICY, PROMPT, QUESTION
from tests.search.scripted_engine import ScriptedEngine, judge
from tests.server.conftest import PlainText, serving

STEPS = ("13 - 9 = 4 (left: 4 4 10)\n\n", "4 * 4 = 16\n\n", "The answer is 16.")


def path(node: int, *texts: str) -> Trajectory:
    return Trajectory(node, tuple((7,) for _ in texts), texts)


@asynccontextmanager
async def judged(judge_engine: ScriptedEngine, **more: Any) -> AsyncIterator[OpenaiEngine]:
    """An engine that gets its rewards from a Hedgerow server over ``judge_engine``."""
    policy = MortalStub(CompletionsStub.of(Text(POLICY)))
    await policy.start()
    app = create_app(create_service(Settings(**more), judge_engine, PlainText()))
    engine = None
    try:
        async with serving(app) as port:
            url = f"http://127.0.0.1:{port}"
            options = OpenaiOptions(
                policy=ServedModel(POLICY, (policy.url,)),
                reward=ServedModel(POLICY, (url,), name="sprig"),
                reward_format="score",
            )
            engine = await OpenaiEngine.start(options)
            yield engine
            await engine.close()
    finally:
        await policy.kill()


async def test_the_last_steps_reward_is_the_paths() -> None:
    """A path's reward is its last step's; equal paths are sent once, empty steps are left out."""
    scripted = ScriptedEngine()
    async with judged(scripted) as engine:
        scripted.scored.clear()
        paths = [path(1, *STEPS[:1]), path(2, *STEPS), path(3, *STEPS[:1]), path(4, *STEPS, "")]
        rewards = await engine.score("oak", PROMPT, QUESTION, paths)
        first, whole = (round_reward(judge(STEPS[:n])) for n in (1, 3))
        assert rewards == [first, whole, first, whole]
        assert len(scripted.scored) == 3  # one call for each level
        assert [t.texts for t in scripted.scored[0]] == [STEPS[:1]]
        assert (await engine.release("oak")).prm_tokens > 0
        assert engine.capabilities.seeded
        assert not engine.capabilities.outcome
        assert not engine.capabilities.likelihood


@pytest.mark.parametrize(
    ("able", "says"),
    [
        ({"outcome": True}, {"outcome": True, "seeded": True}),
        ({"exact": False, "seeded": False}, {"outcome": False, "seeded": False}),
    ],
)
async def test_what_is_promised_there_is_promised_here(
    able: dict[str, bool], says: dict[str, bool]
) -> None:
    """The engine adopts ``outcome`` and ``seeded`` from the scoring server."""

    class OtherEngine(ScriptedEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, **able)

    async with judged(OtherEngine()) as engine:
        capabilities = engine.capabilities
        assert {"outcome": capabilities.outcome, "seeded": capabilities.seeded} == says


async def test_a_server_without_rewards_is_refused() -> None:
    """Start-up fails with the server's own message."""

    class Bare(ScriptedEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, scores=False)

    with pytest.raises(ValueError, match=r"reward_urls: .*/v1/score.*has no reward model"):
        async with judged(Bare()):
            pass


def test_no_other_engine_asks_another_hedgerow() -> None:
    """Other engines refuse the format "score" by name; the openai engine needs a server for it."""
    with pytest.raises(ValueError, match="'score': asks another Hedgerow"):
        local_reward_format("score")
    with pytest.raises(ValueError, match="reward_urls: none; reward_format 'score' needs a server"):
        OpenaiOptions(policy=ServedModel(POLICY, ("http://x",)), reward_format="score")


async def test_the_settings_name_it() -> None:
    """The embedded engine refuses the setting at start."""
    environment = {"HEDGEROW_REWARD_FORMAT": "score"}
    with pytest.raises(ValueError, match="asks another Hedgerow"):
        async with running(load_settings(environment)):
            pass
