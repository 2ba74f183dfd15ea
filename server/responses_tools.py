"""Tools as ``POST /v1/responses`` has them: what a chat's request and messages say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api_errors import bad_value, echo

Json = dict[str, Any]
FUNCTION_PARTS = ("name", "description", "parameters", "strict")


def chat_tools(tools: Any) -> Any:
    """The tools as a chat has them; what is no such tool stays as it is, and is refused there."""
    if not isinstance(tools, list):
        return tools
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    function = {name: tool[name] for name in FUNCTION_PARTS if name in tool}
    return {"type": "function", "function": function}


def chat_choice(choice: Any) -> Any:
    """``tool_choice`` as a chat has it."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def call_of(item: Mapping[str, Any], name: str) -> Json:
    """An earlier call, as a message that a chat has. Raises ApiError naming what is wrong."""
    for part in ("call_id", "name", "arguments"):
        _must_be_text(item, part, name)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_of(item: Mapping[str, Any], name: str, text: str) -> Json:
    """What a tool has told, ``text``, as a message that a chat has. Raises ApiError."""
    _must_be_text(item, "call_id", name)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def with_calls_joined(messages: list[Json]) -> list[Json]:
    """Calls are a part of the assistant's message before them, as chat templates want them."""
    turns: list[Json] = []
    for message in messages:
        if "tool_calls" in message and turns and turns[-1]["role"] == "assistant":
            calls = [*turns[-1].get("tool_calls", []), *message["tool_calls"]]
            turns[-1] = turns[-1] | {"tool_calls": calls}
        else:
            turns.append(message)
    return turns


def _must_be_text(item: Mapping[str, Any], part: str, name: str) -> None:
    if not isinstance(item.get(part), str):
        raise bad_value(f"{name}.{part}", f"must be text, got {echo(item.get(part))}")
