"""Replies under a JSON schema on OpenAI-compatible servers, by the field a server supports."""

from __future__ import annotations

import pytest

from loadtest.hostile.completions_stub import CompletionsStub
from runtime.text import Text
from search.engine import EngineError, Sampling
from search.tree import Finish
from tests.runtime.mortal_pair import POLICY, PROMPT
from tests.runtime.openai.test_openai_engine import branch, stubs

SCHEMA_SAMPLING = Sampling(
    stop=(), max_step_tokens=16, prompt_tokens=len(PROMPT), grammar='{"const":"so it is"}'
)


@pytest.mark.parametrize("field", ["structured_outputs", "response_format"])
async def test_the_field_is_learned_by_asking(field: str) -> None:
    """The engine finds vLLM's or OpenAI's field by a trial; replies fit the schema, in one call."""
    stub = CompletionsStub.of(Text(POLICY))
    stub.grammar = field
    async with stubs(stub) as servers:
        able = servers.engine.capabilities
        assert (able.grammar, able.grammar_at_once) == (True, True)
        (step,) = await servers.engine.expand("oak", [branch()], SCHEMA_SAMPLING)
        assert (step.text, step.finish) == ('"so it is"', Finish.END)
        with pytest.raises(EngineError, match="one call"):
            await servers.engine.expand("elm", [branch()], Sampling(grammar="{}"))


async def test_a_server_that_knows_none_is_said_to() -> None:
    """A server that ignores schemas would answer freely, so the request is refused beforehand."""
    async with stubs() as servers:
        assert not servers.engine.capabilities.grammar
        with pytest.raises(EngineError, match="holds to no schema"):
            await servers.engine.expand("oak", [branch()], SCHEMA_SAMPLING)
