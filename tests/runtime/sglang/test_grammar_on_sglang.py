"""Plain replies under a JSON schema on real SGLang servers: its own grammar backend holds them."""

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
    """On a policy's server with our plug-in."""
    policy, _ = await yard.have("policy", "reward")
    made = await SglangEngine.start(options([policy], []))
    yield made
    await made.close()


@pytest.mark.promise("On SGLang too a plain reply under a schema that ends by itself fits it")
async def test_replies_fit_their_schema(engine: SglangEngine) -> None:
    """By draws and greedily, with the prompt's ids and a seed as without one; twice the same."""
    able = engine.capabilities
    assert (able.grammar, able.grammar_at_once) == (True, True)
    ended = 0
    for number, question in enumerate((*QUESTIONS, *QUESTIONS)):
        wanted = PlainCompletion(
            prompt_of(question), 120, 120, number, float(number % 3), grammar=GRAMMAR
        )
        replies = [await complete(wanted, engine, f"g{number}.{i}", lambda _: None) for i in (0, 1)]
        assert replies[0] == replies[1]
        if replies[0].finish_reason == "stop":
            ended += 1
            jsonschema_rs.validate(SCHEMA, json.loads(replies[0].text))
    assert ended


async def test_it_is_drawn_in_one_call(engine: SglangEngine) -> None:
    """The server would begin the grammar anew in a second one."""
    prompt = prompt_of(QUESTIONS[0])
    begun = (*prompt, *TEXT.encode_after("{"))
    branch = Branch(ROOT, 0, begun, node_seed(1, "step", (0,)), 8, 1)
    sampling = Sampling(stop=(), max_step_tokens=8, prompt_tokens=len(prompt), grammar=GRAMMAR)
    with pytest.raises(EngineError, match="one call"):
        await engine.expand("twice", [branch], sampling)


async def test_whatever_the_schema_nothing_else_changes(engine: SglangEngine) -> None:
    """A draw without one, beside draws with one."""
    prompt = prompt_of(QUESTIONS[0])
    branch = Branch(ROOT, 0, prompt, node_seed(1, "step", (0,)), 24, 1)
    free = Sampling(temperature=0.0, max_step_tokens=24, prompt_tokens=len(prompt))
    [before] = await engine.expand("free", [branch], free)
    held = Sampling(0.0, stop=(), max_step_tokens=24, prompt_tokens=len(prompt), grammar=GRAMMAR)
    [reply] = await engine.expand("held", [branch], held)
    [after] = await engine.expand("free again", [branch], free)
    assert before.tokens == after.tokens
    assert reply.text.startswith("{")
    assert reply.finish in (Finish.END, Finish.LENGTH)
