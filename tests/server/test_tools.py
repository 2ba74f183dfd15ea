"""``tools`` of chat completions through the real ``openai`` client; tokens are characters here."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from runtime.tool_template import ToolTemplate
from search.engine import Branch
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from server.written_reply import CONNECTION
from tests.search.scripted_engine import ScriptedEngine, decode
from tests.server.conftest import PlainText, chat, client_over, question, refusal, saying, search_of
from tests.server.test_tool_calls import tagged

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
REQUEST: Any = {"model": "sprig", "messages": question("2 and 3?"), "tools": [ADD, WEATHER]}
REPLY = f"Let me add.\n{tagged(a=2, b=3)}\n{tagged('weather')}"
HISTORY: Any = [
    {"role": "user", "content": "2 and 3?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]


class QwenText(PlainText):
    """The tokenizer of a model whose chat template has tools."""

    tool_template = ToolTemplate(tools=True, calls=True, results=True, form="tagged")


@pytest.fixture
def app(settings: Settings, engine: ScriptedEngine) -> FastAPI:
    """The app of a model whose chat template has tools."""
    return create_app(create_service(settings, engine, QwenText()))  # type: ignore[arg-type]


async def test_the_model_may_call(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The prompt has the tools; calls are read from the reply, which ends by ``tool_calls``."""
    engine.say = saying(REPLY)
    completion = await chat(openai, **REQUEST)
    assert decode(engine.expanded[0][0].tokens) == "tool: add\ntool: weather\nuser: 2 and 3?\n"
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    first, second = choice.message.tool_calls or []
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert (second.function.name, second.function.arguments) == ("weather", "{}")
    assert first.id != second.id


async def test_streamed_calls_are_those_of_the_whole_reply(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """The client's own accumulation of the deltas has the same calls."""
    engine.say = saying(REPLY)
    async with openai.chat.completions.stream(**REQUEST) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    calls = [call.function for call in choice.message.tool_calls or []]
    assert [(call.name, json.loads(call.arguments or "")) for call in calls] == [
        ("add", {"a": 2, "b": 3}),
        ("weather", {}),
    ]


async def test_a_reply_without_a_call(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """It is an ordinary reply; with ``none`` the prompt has no tools and no call is read."""
    engine.say = saying("Five.")
    [choice] = (await chat(openai, **REQUEST)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "Five.")
    assert choice.message.tool_calls is None
    engine.say = saying(REPLY)
    [choice] = (await chat(openai, **REQUEST, tool_choice="none")).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", REPLY)
    assert decode(engine.expanded[-1][0].tokens).startswith("user: 2 and 3?\n")


async def test_one_call_at_a_time(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Without ``parallel_tool_calls`` only the first call counts."""
    engine.say = saying(REPLY)
    [choice] = (await chat(openai, **REQUEST, parallel_tool_calls=False)).choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"


async def test_calls_and_results_go_back_in(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The chat template gets them with arguments as objects."""
    engine.say = saying("Five.")
    await chat(openai, messages=HISTORY)
    call = '{"name": "add", "arguments": {"a": 2}}'
    expected = f"user: 2 and 3?\nassistant: \ncall: {call}\ntool: 5\n"
    assert decode(engine.expanded[0][0].tokens) == expected


async def test_a_search_whose_reply_calls(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The tree reasons; the call is read from the chosen trajectory."""
    parents = set()

    def say(branch: Branch) -> str:
        parents.add(branch.parent)
        return "I add.\n\n" if branch.parent == 0 else tagged(a=branch.child)

    engine.say = say
    completion = await chat(openai, **REQUEST, search={"policy": "rebase", "width": 2, "seed": 1})
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]  # type: ignore[union-attr]
    assert len(parents) > 1


@pytest.mark.parametrize("depth", [1, 900, 5_000, 100_000])
async def test_arguments_that_only_open_are_refused_by_name(
    http: httpx2.AsyncClient, depth: int
) -> None:
    """Any number of open brackets is refused, by the field's path."""
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[" * depth}}
    messages = [*question(), {"role": "assistant", "content": "", "tool_calls": [call]}]
    error = await refusal(http, "/v1/chat/completions", {"model": "sprig", "messages": messages})
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.promise(
    "A tool call that must be made has arguments drawn under the tool's schema, and the reply has "
    "nothing else."
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_that_must_be_called(
    openai: AsyncOpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    """The reply is its arguments, under its schema, and nothing else."""
    engine.grammar, engine.say = True, saying('{"a": 2, "b": 3}')
    choice: Any = {"type": "function", "function": {"name": "add"}}
    async with openai.chat.completions.stream(**REQUEST, tool_choice=choice) as events:
        completion = await events.get_final_completion()
    if not stream:
        completion = await chat(openai, **REQUEST, tool_choice=choice)
    [grammar] = {sampling.grammar for sampling in engine.samplings}
    assert json.loads(grammar or "") == ADD["function"]["parameters"]
    [choice] = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})


async def test_one_of_several_must_be_called(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The reply is a name and arguments; references within a tool's schema stay within it."""
    engine.grammar, engine.say = True, saying('{"name": "put", "arguments": {"at": {"x": 1}}}')
    place = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": place}}
    tools: Any = [ADD, {"type": "function", "function": {"name": "put", "parameters": parameters}}]
    completion = await chat(openai, **REQUEST | {"tools": tools}, tool_choice="required")
    [choice] = completion.choices
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("put", '{"at": {"x": 1}}')
    grammar = json.loads(engine.samplings[0].grammar or "")
    names = [option["properties"]["name"]["const"] for option in grammar["anyOf"]]
    assert names == ["add", "put"]
    assert grammar["$defs"]["tool1"]["properties"]["at"] == {"$ref": "#/$defs/tool1/$defs/P"}


async def test_a_call_that_is_cut(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """It ends by ``length``, with the arguments so far."""
    engine.grammar, engine.say = True, saying('{"a": 2, "b": 3}')
    tools: Any = [ADD]
    reply = await chat(openai, **REQUEST | {"tools": tools}, tool_choice="required", max_tokens=6)
    [choice] = reply.choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (choice.finish_reason, call.function.arguments) == ("length", '{"a": ')


def reason_then_call(branch: Branch) -> str:
    """Return a trajectory of one step and, after it, the rest of the call."""
    _, mark, content = decode(branch.tokens).partition(CONNECTION)
    return '{"a": 2, "b": 3}'[len(content) :] if mark else "The answer is 5."


async def test_a_search_that_must_call(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The tree reasons without the tools' schema; the call is written from the chosen reply."""
    engine.grammar, engine.say = True, reason_then_call
    tools: Any = [ADD]
    completion = await chat(
        openai,
        **REQUEST | {"tools": tools},
        tool_choice="required",
        search={"policy": "rebase", "width": 2, "seed": 1},
    )
    [choice] = completion.choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.function.arguments == '{"a": 2, "b": 3}'
    assert (choice.message.model_extra or {})["reasoning_content"] == "The answer is 5."
    assert search_of(completion)["answer"] == "5"
    assert engine.samplings[0].grammar is None
    assert engine.samplings[-1].grammar is not None


FORCED = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("grammar", "change", "param", "message"),
    [
        (False, {}, "tool_choice", "not held to a schema"),
        (True, {"ignore_eos": True}, "ignore_eos", "leave it out"),
        (True, {"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
        (
            True,
            {
                "tools": [
                    ADD,
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}},
                ]
            },
            "tools",
            "cannot be compiled",
        ),
        (
            True,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
            "cannot be compiled",
        ),
    ],
)
async def test_a_call_that_cannot_be_made_to_happen(
    http: httpx2.AsyncClient,
    engine: ScriptedEngine,
    grammar: bool,
    change: dict[str, Any],
    param: str,
    message: str,
) -> None:
    """It is refused before any draw."""
    engine.grammar = grammar
    error = await refusal(http, "/v1/chat/completions", REQUEST | FORCED | change)
    assert error["param"] == param
    assert message in error["message"]


def tool_with(**fields: Any) -> dict[str, Any]:
    """Return ``tools`` with one tool, some fields of its function changed."""
    return {"tools": [{"type": "function", "function": ADD["function"] | fields}]}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"tools": 5}, "tools", "must be a list"),
        ({"tools": [5]}, "tools[0]", "must be an object"),
        ({"tools": [ADD] * 2}, "tools", "each name is there once"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "functions are"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        (tool_with(name="a b"), "tools[0].function.name", "letters, digits"),
        (tool_with(description=5), "tools[0].function.description", "must be text"),
        (tool_with(parameters=5), "tools[0].function.parameters", "must be a JSON schema"),
        (tool_with(parameters={"type": "array"}), "tools[0].function.parameters.type", "'object'"),
        (tool_with(description="\ud800"), "tools[0].function", "not valid Unicode"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'auto', 'required'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "are allowed"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sing"}}},
            "tool_choice.function.name",
            "add, weather",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}, 5]}]},
            "messages[0].tool_calls[1].function",
            "must be an object",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "add", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "JSON text",
        ),
        (
            {"messages": [{"role": "user", "content": "?", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "assistant's",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str, message: str
) -> None:
    """The error names the field and what is allowed."""
    error = await refusal(http, "/v1/chat/completions", REQUEST | change)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("template", "change", "param", "message"),
    [
        (ToolTemplate(), {}, "tool_choice", "has no tools; send 'none', 'required' or"),
        (ToolTemplate(tools=True), {}, "tool_choice", "in a form not read here"),
        (ToolTemplate(results=True), {"messages": HISTORY}, "messages[1].tool_calls", "out; send"),
        (ToolTemplate(calls=True), {"messages": HISTORY}, "messages[2].role", "user's words"),
    ],
)
async def test_what_a_template_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    template: ToolTemplate,
    change: dict[str, Any],
    param: str,
    message: str,
) -> None:
    """The error says what would work; nothing is dropped silently."""
    monkeypatch.setattr(QwenText, "tool_template", template)
    service = create_service(Settings(), ScriptedEngine(), QwenText())  # type: ignore[arg-type]
    body = (REQUEST if param == "tool_choice" else {"model": "sprig"}) | change
    async with client_over(create_app(service)) as http:
        error = await refusal(http, "/v1/chat/completions", body)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert message in error["message"]
