"""SGLang's OpenAI routes under the openai engine: the steps and trees of the native engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from search.engine import Branch
from search.tree import Finish
from tests.closing import closing
from tests.runtime.same_on_engines import GREEDY, near_rewards, same_steps
from tests.runtime.sglang.real_searches import POLICY, PRM, QUESTIONS, prompt_of
from tests.runtime.sglang.support import SharedServers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

FORMAT = "math-shepherd"
QUESTION = QUESTIONS[0]
PROMPT = prompt_of(QUESTION)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(yard: SharedServers) -> AsyncIterator[OpenaiEngine]:
    """An engine over a policy server without our plug-in and a reward server."""
    policy, reward = await yard.have("stock", "reward")
    options = OpenaiOptions(
        policy=ServedModel(POLICY, (policy.url,)),
        reward=ServedModel(PRM, (reward.url,)),
        reward_format=FORMAT,
        connect_seconds=60,
        probe_seconds=60,
    )
    openai_engine = await OpenaiEngine.start(options)
    yield openai_engine
    await openai_engine.close()


async def test_steps_and_rewards_are_the_embedded_engines(engine: OpenaiEngine) -> None:
    """Greedy steps to the end have equal ids, texts, finishes and log-probabilities; rewards, which
    SGLang gives only from the likeliest tokens, agree to 1e-4."""
    async with closing(
        await EmbeddedEngine.start(
            EngineOptions(str(POLICY), str(PRM), reward_format=FORMAT, threads=1)
        )
    ) as embedded:
        steps = await same_steps(engine, embedded, QUESTION)
        assert steps[-1][0].finish is Finish.END
        await near_rewards(engine, embedded, QUESTION, steps, 1e-4)


async def test_cached_tokens_are_told(engine: OpenaiEngine) -> None:
    """All tokens that a step's child reads come from the cache, but for the last one."""
    first = Branch(0, 0, PROMPT, 1, 64, 1)
    (step,) = await engine.expand("elm", [first], GREEDY)
    await engine.expand("elm", [Branch(1, 0, PROMPT + step.tokens, 2, 64, 2)], GREEDY)
    costs = await engine.release("elm")
    assert costs.rehydrated_tokens == 0
    assert costs.cached_tokens >= len(PROMPT) + len(step.tokens) - 1
