"""``POST /v1/responses`` through the real ``openai`` client; tokens are characters here."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from search.engine import LOGITS_PARAMS
from server.unsupported_parameters import RESPONSES
from tests.search.scripted_engine import ScriptedEngine, decode
from tests.server.conftest import Call, chat, refusal, saying, search_of

REPLY = "It is a small hedge, cut every year."
THOUGHT = "<think>A hedge?</think>It is one."
SEARCH = {"policy": "self_consistency", "width": 2, "seed": 1}
INSIDE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def test_a_plain_response(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Text in, text out, with the fields that the client reads; nothing is stored."""
    engine.say = saying(REPLY)
    response = await openai.responses.create(model="sprig", input="What?", instructions="Be brief.")
    assert response.output_text == REPLY
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.instructions == "Be brief."
    assert (response.model_extra or {})["store"] is False
    [item] = response.output
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert response.id.startswith("resp_")
    prompt = "system: Be brief.\nuser: What?\n"
    assert decode(engine.expanded[0][0].tokens) == prompt
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.output_tokens == len(REPLY) + 1  # and the end token
    assert response.usage.total_tokens == len(prompt) + len(REPLY) + 1
    assert response.usage.output_tokens_details.reasoning_tokens == 0


async def test_turns_and_an_earlier_response(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Messages with and without parts; a response's output may be sent back unchanged."""
    engine.say = saying(THOUGHT)
    first = await openai.responses.create(model="sprig", input="What?")
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}]},
        {"role": "user", "content": "What?"},
        *[item.model_dump() for item in first.output],
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
    ]
    await openai.responses.create(model="sprig", input=items)
    expected = "system: Be\nuser: What?\nassistant: It is one.\nuser: Why?\n"
    assert expected in [decode(branch.tokens) for [branch] in engine.expanded]


@pytest.mark.promise(
    "`/v1/responses` puts a thought into an item before the message, and a stream sends each item"
    " whole, once."
)
async def test_a_thought_is_an_item_of_its_own(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """It precedes the message; in a stream it ends where the reply begins, and both come whole."""
    engine.say = saying(THOUGHT)
    response = await openai.responses.create(model="sprig", input="What?")
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["A hedge?"]
    assert message.type == "message"
    assert response.output_text == "It is one."
    thought, text, kinds = "", "", []
    async for event in await openai.responses.create(model="sprig", input="What?", stream=True):
        kinds.append(event.type)
        assert event.sequence_number == len(kinds) - 1
        if event.type == "response.reasoning_text.delta":
            thought += event.delta
        if event.type == "response.output_text.delta":
            text += event.delta
            assert event.output_index == 1
    assert (thought, text) == ("A hedge?", "It is one.")
    assert [kind for kind in kinds if not kind.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        *INSIDE,
        "response.completed",
    ]


async def test_the_clients_own_stream(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """``.stream`` accumulates the reply of ``.create``."""
    engine.say = saying(REPLY)
    text = ""
    async with openai.responses.stream(model="sprig", input="What?") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = await stream.get_final_response()
    assert text == final.output_text == REPLY
    assert final.usage is not None
    assert final.usage.output_tokens == len(REPLY) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_cut_is_incomplete(
    openai: AsyncOpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    """A reply cut at ``max_output_tokens`` is incomplete, with that reason."""
    engine.say = saying(REPLY)
    fields: Any = {"model": "sprig", "input": "What?", "max_output_tokens": 5}
    response: Any = await openai.responses.create(**fields, stream=stream)
    if stream:
        events = [event async for event in response]
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == REPLY[:5]
    assert response.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_search(openai: AsyncOpenAI, stream: bool) -> None:
    """The tree is that of a chat with the same ``search``; rounds are told if a summary is asked
    for."""
    completion = await chat(openai, "What?", search=SEARCH, include_reasoning=True)
    response: Any = await openai.responses.create(
        model="sprig",
        input="What?",
        reasoning={"summary": "auto"},
        stream=stream,
        extra_body={"search": SEARCH},
    )
    if stream:
        response = [event async for event in response][-1].response
    assert search_of(response)["tree_digest"] == search_of(completion)["tree_digest"]
    assert response.output_text == completion.choices[0].message.content
    rounds = (completion.choices[0].message.model_extra or {})["reasoning_content"]
    assert response.output[0].content[0].text == rounds


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(openai: AsyncOpenAI, engine: ScriptedEngine, stream: bool) -> None:
    """They are returned if ``include`` names them."""
    engine.say = saying(REPLY)
    fields: Any = {"model": "sprig", "input": "What?", "top_logprobs": 2, "stream": stream}
    response: Any = await openai.responses.create(
        **fields, include=["message.output_text.logprobs"]
    )
    if stream:
        events = [event async for event in response]
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert "".join(t.token for e in deltas for t in e.logprobs) == REPLY
        response = events[-1].response
    [item] = response.output
    assert "".join(token.token for token in item.content[0].logprobs) == REPLY
    assert [t.token for t in item.content[0].logprobs[0].top_logprobs] == ["I", "J"]


@pytest.mark.promise("`/v1/responses` draws with the same seed and sampling parameters as a chat.")
async def test_it_is_drawn_as_a_chat_is(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The engine gets the same seed and sampling parameters."""
    engine.logits_params = LOGITS_PARAMS
    fields: Any = {"temperature": 0.5, "top_p": 0.9}
    extra: Any = {"seed": 7, "top_k": 5, "presence_penalty": 0.5}
    await openai.responses.create(model="sprig", **fields, input="What?", extra_body=extra)
    await chat(openai, "What?", **fields, **extra)
    assert engine.samplings[0] == engine.samplings[-1]
    assert engine.expanded[0][0].seed == engine.expanded[-1][0].seed


async def test_a_stream_that_fails_says_so(app: FastAPI, engine: ScriptedEngine) -> None:
    """It ends with an error event, after which the body is cut."""
    engine.fail_at = 0
    call = Call(app, "/v1/responses", {"model": "sprig", "input": "What?", "stream": True})
    with suppress(Exception):  # the exception that cuts the body
        await call.task
    *_, last_block = [block for block in call.body.split(b"\n\n") if block]
    name, data = last_block.splitlines()
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["code"]) == ("error", "engine_unavailable")
    assert not call.complete


@pytest.mark.parametrize("name", RESPONSES)
async def test_what_is_not_offered_is_refused_by_name(http: httpx2.AsyncClient, name: str) -> None:
    """Neutral values of these fields are accepted."""
    body = {"model": "sprig", "input": "What?", "max_output_tokens": 3}
    error = await refusal(http, "/v1/responses", body | {name: "word"})
    assert error["param"] == name
    for value in RESPONSES[name]:
        assert (await http.post("/v1/responses", json=body | {name: value})).status_code == 200


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"store": True}, "store", "False"),
        ({"input": ""}, "input", "not be empty"),
        ({"input": []}, "input", "a list of messages"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "messages, reasoning"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "one of user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_text",
        ),
        ({"input": [{"type": "reasoning"}]}, "input", "at least one message"),
        ({"input": "x" * 5000}, "input", "maximum context length"),
        (
            {
                "instructions": "Be brief.",
                "input": [
                    {"type": "reasoning"},
                    {"type": "function_call", "call_id": "1", "name": "a", "arguments": "5"},
                ],
            },
            "input[1].tool_calls[0].function.arguments",
            "object",
        ),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "leave it out"),
        ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 10**8}, "max_output_tokens", "tokens are allowed"),
        ({"model": "gpt-9"}, "model", "does not exist"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str, words: str
) -> None:
    """The error has the field's name here, not the chat's."""
    answer = await http.post("/v1/responses", json={"model": "sprig", "input": "What?"} | change)
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert "messages:" not in error["message"]
