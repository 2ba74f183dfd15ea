"""``tools`` of ``/v1/responses`` through the real ``openai`` client; tokens are characters here."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, decode
from tests.server.conftest import refusal, saying
from tests.server.test_tools import ADD, REPLY, QwenText, reason_then_call

TOOL: Any = {"type": "function", "strict": True, **ADD["function"]}
WEATHER: Any = {"type": "function", "name": "weather"}
BODY: Any = {"model": "sprig", "input": "2 and 3?", "tools": [TOOL, WEATHER]}
ARGUMENTS = '{"a": 2, "b": 3}'


@pytest.fixture
def app(settings: Settings, engine: ScriptedEngine) -> FastAPI:
    """The app of a model whose chat template has tools."""
    return create_app(create_service(settings, engine, QwenText()))  # type: ignore[arg-type]


async def run_both(openai: AsyncOpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the whole response and a stream's events; check that both end with the same items."""
    response = await openai.responses.create(**fields)
    async with openai.responses.stream(**fields) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [(item.type, getattr(item, "arguments", None)) for item in response.output]
    assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done_events = [event for event in events if event.type == "response.output_item.done"]
    for event in done_events:
        assert final.output[event.output_index].id == event.item.id
    assert len(done_events) == len(final.output)
    return response, events


async def test_the_model_may_call(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Text and calls are items; the request's fields are echoed."""
    engine.say = saying(REPLY)
    reply, _ = await run_both(openai, **BODY)
    assert decode(engine.expanded[0][0].tokens) == "tool: add\ntool: weather\nuser: 2 and 3?\n"
    message, first, second = reply.output
    assert reply.output_text == "Let me add."
    assert message.type == "message"
    assert (first.type, first.name, first.status) == ("function_call", "add", "completed")
    assert json.loads(first.arguments) == {"a": 2, "b": 3}
    assert (second.name, second.arguments) == ("weather", "{}")
    assert first.call_id != second.call_id
    assert [tool.name for tool in reply.tools] == ["add", "weather"]
    assert (reply.tool_choice, reply.parallel_tool_calls) == ("auto", True)
    assert reply.status == "completed"


async def test_a_thought_ends_once(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """A thought, a text and calls: four items, each of which ends once."""
    engine.say = saying(f"<think>Sums.</think>{REPLY}")
    reply, _ = await run_both(openai, **BODY)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in reply.output] == kinds


async def test_a_tool_that_must_be_called(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Its arguments are streamed as they are drawn, and there is no message beside them."""
    engine.grammar, engine.say = True, saying(ARGUMENTS)
    reply, events = await run_both(openai, **BODY, tool_choice={"type": "function", "name": "add"})
    [call] = reply.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", ARGUMENTS)
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_search_that_must_call(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The trajectory is a reasoning item before the call."""
    engine.grammar, engine.say = True, reason_then_call
    search = {"policy": "rebase", "width": 2, "seed": 1}
    response, _ = await run_both(
        openai, **BODY | {"tools": [TOOL]}, tool_choice="required", extra_body={"search": search}
    )
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.output[1].arguments == ARGUMENTS


async def test_a_call_that_is_cut(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Both the call and its response are incomplete."""
    engine.grammar, engine.say = True, saying(ARGUMENTS)
    fields = BODY | {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 6}
    response = await openai.responses.create(**fields)
    [call] = response.output
    assert call.type == "function_call"
    assert (call.arguments, call.status, response.status) == ('{"a": ', "incomplete", "incomplete")


async def test_calls_and_results_go_back_in(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The prompt has a response's items and the tools' results."""
    engine.say = saying(REPLY)
    first = await openai.responses.create(**BODY)
    calls = [item for item in first.output if item.type == "function_call"]
    items: Any = [
        {"role": "user", "content": "2 and 3?"},
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "5"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "Sun"}],
        },
    ]
    engine.say = saying("Five.")
    await openai.responses.create(**BODY | {"input": items})
    expected = [
        "tool: add",
        "tool: weather",
        "user: 2 and 3?",
        "assistant: Let me add.",
        'call: {"name": "add", "arguments": {"a": 2, "b": 3}}',
        'call: {"name": "weather", "arguments": {}}',
        "tool: 5",
        "tool: Sun\n",
    ]
    assert decode(engine.expanded[-1][0].tokens) == "\n".join(expected)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [TOOL | {"parameters": {"maximum": inf}}], "tool_choice": "none"}, "tools"),
        ({"tools": [TOOL | {"note": "\ud800"}], "tool_choice": "none"}, "tools"),
        ({"text": {"format": {"type": "text", "note": "\ud800"}}}, "text"),
        ({"tool_choice": {"type": "function", "name": "sing"}}, "tool_choice.name"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str
) -> None:
    """The error has the field's name in ``/v1/responses``."""
    error = await refusal(http, "/v1/responses", BODY | change)
    assert error["param"] == param
    assert error["message"].startswith(param)
