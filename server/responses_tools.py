"""Converts tools, calls and results of ``POST /v1/responses`` to a chat request's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api_errors import bad_value, echo

Json = dict[str, Any]
FUNCTION_PARTS = ("name", "description", "parameters", "strict")


def chat_tools(tools: Any) -> Any:
    """The tools in a chat's form; anything else stays as it is, and the chat request refuses it."""
    if not isinstance(tools, list):
        return tools
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    function = {name: tool[name] for name in FUNCTION_PARTS if name in tool}
    return {"type": "function", "function": function}


def chat_choice(choice: Any) -> Any:
    """``tool_choice`` in a chat's form."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def call_of(item: Mapping[str, Any], name: str) -> Json:
    """An earlier tool call as a chat message. Raises ApiError naming a wrong part."""
    for part in ("call_id", "name", "arguments"):
        _must_be_text(item, part, name)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_of(item: Mapping[str, Any], name: str, text: str) -> Json:
    """A tool's result ``text`` as a chat message. Raises ApiError for a wrong ``call_id``."""
    _must_be_text(item, "call_id", name)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def join_calls(messages: list[Json]) -> list[Json]:
    """Join calls to the assistant's message before them, as chat templates expect."""
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
