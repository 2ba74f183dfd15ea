"""A search that reasons freely and replies under a schema; tokens are characters here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from search.engine import Branch, Sampling, Step
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, babble, decode
from tests.server.conftest import Call, PlainText, chat, chunks, client_over, question, refusal

MARK = "The answer as JSON:\n"
SEARCH = {"policy": "rebase", "width": 4, "seed": 2}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Answer(BaseModel):
    """The type that a client wants to read."""

    answer: int


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": Answer.model_json_schema()},
}


def say(branch: Branch) -> str:
    """Babble; after the mark write the rest of the answer that the reasoning came to."""
    before, mark, content = decode(branch.tokens).partition(MARK)
    if not mark:
        return babble(branch)
    whole = f'{{"answer": {before.rpartition("answer is ")[2].strip()[0]}}}'
    return whole[len(content) :]


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that is held to schemas, as far as a script can be."""
    return ScriptedEngine(grammar=True, say=say)


def body(**fields: Any) -> dict[str, Any]:
    """Return a searched chat's request."""
    return {"model": "sprig", "messages": question(), "search": SEARCH, "max_tokens": 90} | fields


async def answer_to(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Post a request and return the answer, which must be no error."""
    answer = await http.post(PATHS[0], json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.promise(
    "A search with a JSON schema grows the same tree as without one, and its reply is drawn under "
    "the schema."
)
async def test_the_tree_reasons_and_the_reply_is_written(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The chosen trajectory is the reasoning, the JSON the content; tree, vote and answer are those
    without a schema; written tokens are counted and follow on the trajectory's own ids."""
    free = await answer_to(http)
    assert {sampling.grammar for sampling in engine.samplings} == {None}
    engine.expanded.clear()
    typed = await answer_to(http, response_format=FORMAT)
    [plain], [choice] = free["choices"], typed["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == plain["message"]["content"]
    assert message["content"] == f'{{"answer": {free["search"]["answer"]}}}'
    assert choice["finish_reason"] == "stop"
    for name in ("tree_digest", "answer", "votes", "stop_reason"):
        assert typed["search"][name] == free["search"][name]
    tokens = len(message["content"]) + 1  # and the end token
    search_tokens = free["usage"]["completion_tokens"]
    assert typed["usage"]["completion_tokens"] == search_tokens + tokens
    assert typed["usage"]["completion_tokens_details"] == {"reasoning_tokens": search_tokens}
    prompt = f"user: What is it?\n{plain['message']['content']}\n\n{MARK}"
    [[first], *_] = [r for r in engine.expanded if MARK in decode(r[0].tokens)]
    assert decode(first.tokens) == prompt
    last_sampling = engine.samplings[-1]
    assert json.loads(last_sampling.grammar or "") == FORMAT["json_schema"]["schema"]  # type: ignore[index]
    assert (last_sampling.prompt_tokens, last_sampling.temperature) == (len(prompt), 0.0)
    assert not engine.live


@pytest.mark.parametrize("with_rounds", [False, True])
async def test_a_stream_tells_the_same(
    http: httpx2.AsyncClient, openai: AsyncOpenAI, with_rounds: bool
) -> None:
    """Reasoning first, then the JSON, and no thought after it began; the reasoning is the
    trajectory, after the rounds if they are asked for."""
    whole = await answer_to(http, response_format=FORMAT, include_reasoning=with_rounds)
    message = whole["choices"][0]["message"]
    fields: Any = {"search": SEARCH, "response_format": FORMAT, "include_reasoning": with_rounds}
    stream = await chunks(openai, **fields, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert "".join(thoughts) == message["reasoning_content"]
    assert "".join(contents) == message["content"]
    kinds = [bool(t) for t, c in zip(thoughts, contents, strict=True) if t or c]
    assert kinds == sorted(kinds, reverse=True)
    assert ("round 1" in message["reasoning_content"]) == with_rounds
    assert stream[-1].usage is not None
    assert stream[-1].usage.model_dump(exclude_none=True) == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_is_written(openai: AsyncOpenAI, stream: bool) -> None:
    """Choices are the best distinct answers, each from its own trajectory."""
    fields: Any = {"n": 3, "response_format": FORMAT, "search": SEARCH | {"width": 16}}
    texts: dict[int, str] = {}
    if stream:
        thoughts: dict[int, str] = {}
        for chunk in await chunks(openai, **fields):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                thought = getattr(choice.delta, "reasoning_content", None) or ""
                thoughts[choice.index] = thoughts.get(choice.index, "") + thought
    else:
        completion: Any = await chat(openai, **fields)
        texts = {choice.index: choice.message.content for choice in completion.choices}
        thoughts = {choice.index: choice.message.reasoning_content for choice in completion.choices}
    answers = [Answer.model_validate_json(text).answer for text in texts.values()]
    assert len(set(answers)) == 3
    for index, answer in enumerate(answers):
        assert f"The answer is {answer}." in thoughts[index]


async def test_a_response_is_typed(openai: AsyncOpenAI) -> None:
    """A reasoning item, then the message; a stream has the same."""
    extra = {"search": SEARCH, "seed": 2}
    response = await openai.responses.parse(
        model="sprig", input="What is it?", text_format=Answer, extra_body=extra
    )
    reasoning, message = response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert isinstance(response.output_parsed, Answer)
    async with openai.responses.stream(
        model="sprig", input="What is it?", text_format=Answer, extra_body=extra
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_parsed == response.output_parsed
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert final.usage is not None
    assert final.usage == response.usage


async def test_a_text_completion_is_the_json_alone(http: httpx2.AsyncClient) -> None:
    """A text completion has no place for reasoning."""
    request = {"model": "sprig", "prompt": "a", "search": SEARCH, "guided_json": {"type": "object"}}
    choice = (await http.post(PATHS[1], json=request)).json()["choices"][0]
    assert set(json.loads(choice["text"])) == {"answer"}


async def test_the_trees_budget_holds_for_both(http: httpx2.AsyncClient) -> None:
    """The JSON may use the tokens that the tree has left: its beginning, or nothing."""
    free = await answer_to(http)
    search_tokens = free["usage"]["completion_tokens"]
    for remaining in (0, 5):
        search = SEARCH | {"max_tokens": search_tokens + remaining}
        typed = await answer_to(http, search=search, response_format=FORMAT)
        [choice] = typed["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == '{"answer": 1}'[:remaining]
        assert choice["message"]["reasoning_content"]
        assert typed["usage"]["completion_tokens"] == search_tokens + remaining
        assert typed["search"]["tree_digest"] == free["search"]["tree_digest"]


@pytest.mark.parametrize("settings", [{"max_tree_tokens": 100}], indirect=True)
async def test_a_keys_limit_on_a_tree_holds_for_both(http: httpx2.AsyncClient) -> None:
    """A tree of at most 4 * 25 tokens needs no budget of its own; the JSON gets what it leaves."""
    search = {"policy": "self_consistency", "width": 4, "max_depth": 1, "max_step_tokens": 25}
    typed = await answer_to(http, search=search | {"seed": 1}, response_format=FORMAT)
    assert typed["usage"]["completion_tokens"] <= 100


async def test_an_open_thought_is_closed_first(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The JSON is no part of the thought; the tags are not sent."""
    engine.say = lambda branch: (
        "{}" if MARK in decode(branch.tokens) else "<think>Hm. The answer is 3."
    )
    typed = await answer_to(http, response_format={"type": "json_object"})
    message = typed["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm. The answer is 3."
    assert message["content"] == "{}"
    prompt = decode(engine.expanded[-1][0].tokens)
    assert prompt.endswith(f"<think>Hm. The answer is 3.\n</think>\n\n{MARK}")


class SlowWriter(ScriptedEngine):
    """Hangs while the reply is written."""

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw the search's steps as scripted; hang under a grammar."""
        if sampling.grammar is None:
            return await super().expand(tree, branches, sampling)
        self.live.add(tree)
        self.waiting.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_is_written(stream: bool) -> None:
    """The writing is aborted; the search's tokens are booked, as one request."""
    engine = SlowWriter(grammar=True)
    app = create_app(create_service(Settings(), engine, PlainText()))  # type: ignore[arg-type]
    call = Call(app, PATHS[0], body(response_format=FORMAT, stream=stream))
    await engine.waiting.wait()
    call.disconnect.set()
    await call.task
    service = app.state.service
    await service.runner.close()
    assert not engine.live
    assert not service.runner.under_way
    [account] = [row for row in service.quotas.all() if row["requests"]]
    assert (account["requests"], account["searches"]) == (1, 1)


async def test_a_deadline_ends_the_writing_too() -> None:
    """A part of the time is kept for writing; if that runs out too, the answer is a 504."""
    engine = SlowWriter(grammar=True)
    app = create_app(create_service(Settings(), engine, PlainText()))  # type: ignore[arg-type]
    request = body(response_format=FORMAT, search=SEARCH | {"deadline_ms": 200})
    async with client_over(app) as http:
        error = await refusal(http, PATHS[0], request, 504)
    assert error["code"] == "deadline_exceeded"
    assert not engine.live
