"""vLLM's sampling parameters on real SGLang servers, beside the embedded engine's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields

import pytest
import pytest_asyncio

from loadtest.searches import steps_of
from runtime.sglang.sglang_engine import SglangEngine
from search.engine import LOGITS_PARAMS, Engine, LogitsParams
from server.assemble import running
from server.plain_completion import PlainCompletion, complete
from server.settings import load_settings
from tests.runtime.sglang.real_searches import (
    QUESTIONS,
    TEXT,
    grow,
    options,
    prompt_of,
)
from tests.runtime.sglang.support import ON_SERVERS, SharedServers

pytestmark = [*ON_SERVERS, pytest.mark.asyncio(loop_scope="session")]

TIMES, PLUS = (TEXT.pieces.index(piece) for piece in (b" *", b" +"))
PARAMETERS = [
    LogitsParams(top_k=2),
    LogitsParams(min_p=0.4),
    LogitsParams(logit_bias=((TIMES, -50.0), (PLUS, 3.0))),
    LogitsParams(min_tokens=90),
    LogitsParams(repetition_penalty=1.3),
    LogitsParams(presence_penalty=1.5),
    LogitsParams(frequency_penalty=0.7),
    LogitsParams(20, 0.01, ((TIMES, -2.0),), 40, 1.1, 0.3, -0.2),
]


@pytest_asyncio.fixture(loop_scope="session")
async def engines(yard: SharedServers) -> AsyncIterator[tuple[Engine, SglangEngine]]:
    """The embedded engine, and one on a policy server with our plug-in."""
    (server,) = await yard.have("policy")
    engine = await SglangEngine.start(options([server], []))
    async with running(load_settings({})) as embedded:
        yield embedded.engine, engine
    await engine.close()


async def reply(engine: Engine, params: LogitsParams, piece: int) -> str:
    """The beginning of a plain reply, drawn ``piece`` tokens at a time."""
    completion = PlainCompletion(prompt_of(QUESTIONS[0]), 100, piece, 7, logits=params)
    return (await complete(completion, engine, f"{params}/{piece}", lambda text: None)).text


@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: "+".join(params.active()))
async def test_a_reply_is_the_embedded_engines(
    engines: tuple[Engine, SglangEngine], params: LogitsParams
) -> None:
    """Replies are equal in one request or many, as earlier pieces count as output."""
    embedded, engine = engines
    assert engine.capabilities.logits_params == LOGITS_PARAMS
    plain, whole, pieces = await asyncio.gather(
        reply(engine, LogitsParams(), 100), reply(engine, params, 100), reply(engine, params, 9)
    )
    assert plain != whole == pieces == await reply(embedded, params, 32)


@pytest.mark.parametrize("policy", ["best_of_n", "self_consistency"])
@pytest.mark.promise(
    "Sampling parameters on SGLang count a whole trajectory, however many requests draw it."
)
async def test_a_tree_is_the_embedded_engines(
    engines: tuple[Engine, SglangEngine], policy: str
) -> None:
    """Trees are equal step by step and as chains; a penalty counts the whole trajectory."""
    params = {field.name: getattr(PARAMETERS[-1], field.name) for field in fields(LogitsParams)}
    spec = params | {"logit_bias": {TIMES: -2.0}, "policy": policy, "width": 8}
    embedded, engine = engines
    trees = [steps_of(await grow(either, QUESTIONS[0], **spec)) for either in (embedded, engine)]
    assert trees[0] == trees[1]
    assert trees[0] != steps_of(await grow(engine, QUESTIONS[0], policy=policy, width=8))
