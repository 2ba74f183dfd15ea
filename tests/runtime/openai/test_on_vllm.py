"""Real vLLM servers on the CPU under the openai engine; ``make test-vllm`` makes their environment.

The policy's steps are the embedded engine's, a tiny Qwen2.5-Math-PRM's rewards are its own forward
pass's.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import pytest
import pytest_asyncio

from loadtest.on_vllm import VLLM
from models.bundled import SPRIG_FOLDER
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.text import Text
from search.controller import search
from search.engine import Branch, LogitsParams, Sampling
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import Finish
from tests.closing import closing
from tests.runtime.openai.vllm_server import serving
from tests.runtime.published_models import qwen_prm_for_vllm
from tests.runtime.same_on_engines import GREEDY, near_rewards, same_steps
from tests.runtime.sglang.real_searches import prompt_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

POLICY = SPRIG_FOLDER / "policy"
TEXT = Text(POLICY)
QUESTION = "Use 4 9 10 13 to make 24."
PROMPT = prompt_of(QUESTION)
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
OPTIONS = (
    "--enable-prompt-tokens-details",
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""Without white space allowed between JSON tokens no reply can go on in blanks forever."""
FORMAT = "qwen2.5-math-prm"


@pytest.fixture(scope="module")
def prm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Math-PRM."""
    return qwen_prm_for_vllm(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def servers(prm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of the policy and reward servers; the latter gets its step tag's id by option."""
    assert VLLM.is_file(), "make vllm-env first"
    logs = tmp_path_factory.mktemp("logs")
    tag = Text(prm).token("<extra_0>")
    pooling = ["--runner", "pooling", "--pooler-config", f'{{"step_tag_id": {tag}}}']
    with (
        serving(POLICY, logs / "policy", OPTIONS) as policy,
        serving(prm, logs / "prm", pooling) as reward,
    ):
        yield policy, reward


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(servers: tuple[str, str], prm: Path) -> AsyncIterator[OpenaiEngine]:
    """An engine over both servers."""
    policy, reward = servers
    options = OpenaiOptions(
        policy=ServedModel(POLICY, (policy,)),
        reward=ServedModel(prm, (reward,)),
        reward_format=FORMAT,
    )
    openai_engine = await OpenaiEngine.start(options)
    yield openai_engine
    await openai_engine.close()


async def test_steps_and_rewards_are_the_embedded_engines(engine: OpenaiEngine, prm: Path) -> None:
    """Greedy steps to the end are equal, and rewards agree to 1e-3."""
    async with closing(
        await EmbeddedEngine.start(
            EngineOptions(str(POLICY), str(prm), reward_format=FORMAT, threads=1)
        )
    ) as embedded:
        steps = await same_steps(engine, embedded, QUESTION)
        await near_rewards(engine, embedded, QUESTION, steps, 1e-3)


@pytest.mark.parametrize("policy", ["best_of_n", "rebase", "dvts", "ets"])
async def test_the_same_seed_is_the_same_tree(engine: OpenaiEngine, policy: str) -> None:
    """Two searches with one seed give one tree: vLLM draws by each request's own seed."""
    outcomes = [
        await search(
            Problem(PROMPT, QUESTION),
            SearchSpec(policy=policy, width=4, seed=3),
            engine,
            tree_id=f"{policy}-{number}",
            answer_of=lambda text: text,
            deadline=None,
            clock=time.monotonic,
        )
        for number in range(2)
    ]
    assert outcomes[0].digest == outcomes[1].digest
    assert outcomes[0].answer


END = min(TEXT.eos)
PARAMETERS = (
    LogitsParams(repetition_penalty=1.3),
    LogitsParams(logit_bias=((TEXT.encode("-")[0], 6.0), (TEXT.encode("+")[0], -100.0))),
    LogitsParams(logit_bias=((END, 30.0),), min_tokens=40),
    LogitsParams(logit_bias=((END, 30.0),), min_tokens=40, repetition_penalty=1.2),
    LogitsParams(top_k=1),
    LogitsParams(min_p=1.0),
)


@pytest.mark.promise(
    "Sampling parameters on vLLM act on whole trajectories: greedy and top-k or min-p steps equal "
    "the embedded engine's."
)
@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: " ".join(params.active()))
async def test_sampling_parameters_are_the_embedded_engines(
    engine: OpenaiEngine, params: LogitsParams
) -> None:
    """Greedy steps are equal under each parameter, sampled ones under ``top_k`` and ``min_p``."""
    assert set(params.active()) <= set(engine.capabilities.logits_params)
    heat = 2.0 if {*params.active()} <= {"top_k", "min_p"} else 0.0
    sampling = replace(GREEDY, temperature=heat, logits=params, prompt_tokens=len(PROMPT))
    async with closing(
        await EmbeddedEngine.start(EngineOptions(str(POLICY), threads=1))
    ) as embedded:
        steps = await same_steps(engine, embedded, QUESTION, sampling)
    assert sum(len(ours.tokens) for ours, _ in steps) > params.min_tokens


async def test_whole_blocks_are_cached(engine: OpenaiEngine) -> None:
    """Of a child's prefix the whole blocks of 32 tokens are expected in the cache."""
    (step,) = await engine.expand("elm", [Branch(0, 0, PROMPT, 1, 64, 1)], GREEDY)
    path = PROMPT + step.tokens
    await engine.expand("elm", [Branch(1, 0, path, 2, 64, 2)], GREEDY)
    costs = await engine.release("elm")
    assert costs.expected_tokens == (len(path) - 1) // 32 * 32
    assert costs.rehydrated_tokens == 0


async def test_a_reply_under_a_schema_fits_it(engine: OpenaiEngine) -> None:
    """Replies under ``structured_outputs``, each drawn in one call, fit the schema."""
    assert engine.capabilities.grammar
    sampling = Sampling(
        stop=(), max_step_tokens=120, prompt_tokens=len(PROMPT), grammar=json.dumps(SCHEMA)
    )
    branches = [Branch(0, i, PROMPT, 7 + i, 120, i + 1) for i in range(6)]
    steps = await engine.expand("ash", branches, sampling)
    whole_replies = [step for step in steps if step.finish is Finish.END]
    assert whole_replies
    for step in whole_replies:
        jsonschema_rs.validate(SCHEMA, json.loads(step.text))
