"""Plain replies under a JSON schema on real SGLang servers, by SGLang's own grammar backend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import jsonschema_rs
import pytest
import pytest_asyncio

from runtime.sglang.sglang_engine import SglangEngine
from search.engine import Branch, EngineError, Sampling
from search.tree import ROOT, Finish, node_seed
from server.plain_completion import PlainCompletion, complete
from tests.runtime.sglang.real_searches import QUESTIONS, TEXT, options, prompt_of
from tests.runtime.sglang.support import ON_SERVERS, SharedServers

pytestmark = [*ON_SERVERS, pytest.mark.nightly, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 99},
        "signs": {"type": "array", "items": {"enum": ["+", "-"]}, "maxItems": 3},
    },
    "required": ["sum", "signs"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps(SCHEMA)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(yard: SharedServers) -> AsyncIterator[SglangEngine]:
    """An engine on a policy server with our plug-in."""
    policy, _ = await yard.have("policy", "reward")
    sglang_engine = await SglangEngine.start(options([policy], []))
    yield sglang_engine
    await sglang_engine.close()


@pytest.mark.promise(
    "A plain reply under a JSON schema fits the schema on SGLang too if it ends by itself."
)
async def test_replies_fit_their_schema(engine: SglangEngine) -> None:
    """Replies that end by themselves fit the schema, sampled or greedy; equal requests agree."""
    able = engine.capabilities
    assert (able.grammar, able.grammar_at_once) == (True, True)
    whole_replies = 0
    for number, question in enumerate((*QUESTIONS, *QUESTIONS)):
        plain = PlainCompletion(
            prompt_of(question), 120, 120, number, float(number % 3), grammar=GRAMMAR
        )
        replies = [await complete(plain, engine, f"g{number}.{i}", lambda _: None) for i in (0, 1)]
        assert replies[0] == replies[1]
        if replies[0].finish_reason == "stop":
            whole_replies += 1
            jsonschema_rs.validate(SCHEMA, json.loads(replies[0].text))
    assert whole_replies


async def test_it_is_drawn_in_one_call(engine: SglangEngine) -> None:
    """A reply in a second call is refused, because the server would restart the grammar."""
    prompt = prompt_of(QUESTIONS[0])
    prefix = (*prompt, *TEXT.encode_after("{"))
    branch = Branch(ROOT, 0, prefix, node_seed(1, "step", (0,)), 8, 1)
    sampling = Sampling(stop=(), max_step_tokens=8, prompt_tokens=len(prompt), grammar=GRAMMAR)
    with pytest.raises(EngineError, match="one call"):
        await engine.expand("twice", [branch], sampling)


async def test_whatever_the_schema_nothing_else_changes(engine: SglangEngine) -> None:
    """A draw without a schema is the same before and after a draw with one."""
    prompt = prompt_of(QUESTIONS[0])
    branch = Branch(ROOT, 0, prompt, node_seed(1, "step", (0,)), 24, 1)
    free = Sampling(temperature=0.0, max_step_tokens=24, prompt_tokens=len(prompt))
    [before] = await engine.expand("free", [branch], free)
    strict = Sampling(0.0, stop=(), max_step_tokens=24, prompt_tokens=len(prompt), grammar=GRAMMAR)
    [reply] = await engine.expand("held", [branch], strict)
    [after] = await engine.expand("free again", [branch], free)
    assert before.tokens == after.tokens
    assert reply.text.startswith("{")
    assert reply.finish in (Finish.END, Finish.LENGTH)
