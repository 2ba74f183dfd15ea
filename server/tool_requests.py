"""Validates a request's tools and ``tool_choice``, and the tool calls in its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.tool_template import ToolTemplate
from server.api_errors import ApiError, bad_value, echo, unsupported
from server.body_schemas import STRING, object_of
from server.reply_schema import RequestedSchema
from server.tool_calls import CallReader

if TYPE_CHECKING:
    from server.request_models import ChatRequest
    from server.service import Service

MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FUNCTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {**STRING, "pattern": f"^{NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {
            "type": ["object", "null"],
            "properties": {"type": {"const": "object"}},
        },
    },
    "required": ["name"],
}


def tools_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list of tools, each of schema ``tool``."""
    return {"type": ["array", "null"], "maxItems": MOST_TOOLS, "items": tool}


def choice_schema(function_choice: dict[str, Any]) -> dict[str, Any]:
    """The schema of ``tool_choice``; ``function_choice``: of a choice that names a function."""
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, function_choice]}


ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a tool that declares none."""


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """A request's tools. ``tools``: for the chat template; ``reader``: reads calls from the reply;
    ``schema``: what the reply must fit if it must be a call."""

    tools: tuple[dict[str, Any], ...]
    reader: CallReader
    schema: RequestedSchema | None = None


async def tools_of(request: ChatRequest, service: Service) -> RequestedTools | None:
    """The tools of a chat request, None if no call may be made. Raises ApiError naming what is
    wrong or not supported by the model's chat template or engine."""
    template = await tool_template(service) if request.tools else ToolTemplate()
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    tools = requested_tools(request.tools, choice, parallel, template)
    if tools is None or tools.schema is None:
        return tools
    able = service.runner.engine.capabilities
    if not able.grammar:
        why = f"the {able.engine} engine's replies are not held to a schema"
        raise unsupported("tool_choice", f"{why}; send 'auto' or 'none'")
    if request.ignore_eos:
        raise bad_value("ignore_eos", "leave it out with a call that must be made")
    return tools


async def tool_template(service: Service) -> ToolTemplate:
    """How the model's chat template renders tools and calls."""
    return await service.tokenizing.run(service.text, 0, lambda text: text.tool_template)


def requested_tools(
    tools: Any, choice: Any, parallel: bool | None, template: ToolTemplate
) -> RequestedTools | None:
    """The tools by a chat's ``tools`` and ``tool_choice``; None if no call may be made. Raises
    ApiError naming what is wrong or not supported by the model's chat template."""
    functions = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(_listed(tools)))
    names = tuple(tool["function"]["name"] for tool in functions)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_value("tools", f"each name is there once, {echo(twice)} is not")
    selection = _choice(choice, names)
    if selection == "none" or not functions:
        return None
    if selection == "auto":
        if template.form is None:
            why = "has no tools" if not template.tools else "has calls in a form not read here"
            hint = "send 'none', 'required' or a function's name"
            raise unsupported("tool_choice", f"'auto': this model's chat template {why}; {hint}")
        return RequestedTools(functions, CallReader(template.form, names, parallel is not False))
    choices = functions if selection == "required" else [functions[names.index(selection["name"])]]
    prompt_tools = functions if template.tools else ()
    if len(choices) == 1:
        [only] = choices
        reader = CallReader("arguments", (only["function"]["name"],))
        field = f"tools[{functions.index(only)}].function.parameters"
        return RequestedTools(prompt_tools, reader, RequestedSchema(field, _arguments(only)))
    schema = RequestedSchema("tools", _one_of(choices))
    return RequestedTools(prompt_tools, CallReader("choice", names), schema)


def _listed(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_value("tools", f"must be a list, got {echo(tools)}")
    if len(tools) > MOST_TOOLS:
        raise bad_value("tools", f"at most {MOST_TOOLS} are allowed, got {len(tools)}")
    return tools


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """Check a tool; return it with only its name, description and parameters."""
    if not isinstance(tool, Mapping):
        raise bad_value(name, f"must be an object, got {echo(tool)}")
    if tool.get("type") != "function":
        raise unsupported(f"{name}.type", f"functions are, got {echo(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_value(f"{name}.function", f"must be an object, got {echo(function)}")
    function_name = function.get("name")
    if not isinstance(function_name, str) or not NAME.fullmatch(function_name):
        rule = "1 to 64 letters, digits, '_', '-' and '.'"
        raise bad_value(f"{name}.function.name", f"must be {rule}, got {echo(function_name)}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad_value(f"{name}.function.description", f"must be text, got {echo(description)}")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        rule = "must be a JSON schema of an object"
        raise bad_value(f"{name}.function.parameters", f"{rule}, got {echo(schema)}")
    if schema and schema.get("type", "object") != "object":
        rule = "must be 'object'"
        raise bad_value(f"{name}.function.parameters.type", f"{rule}, got {echo(schema['type'])}")
    must_encode(function, f"{name}.function")
    optional = {} if description is None else {"description": description}
    return {
        "type": "function",
        "function": {"name": function_name, **optional, "parameters": schema or dict(ANYTHING)},
    }


def _choice(choice: Any, names: tuple[str, ...]) -> Any:
    """Check ``tool_choice``: ``none``, ``auto``, ``required`` or an object with a tool's name."""
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not names:
            raise bad_value("tool_choice", "there are no tools to call")
        return choice or "auto"
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "allowed_tools":
        raise unsupported("tool_choice.type", "send the tools that are allowed as tools")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        rule = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise bad_value("tool_choice", f"must be {rule}, got {echo(choice)}")
    if function.get("name") not in names:
        rule = f"must be one of the tools: {', '.join(names) or 'there are none'}"
        raise bad_value("tool_choice.function.name", f"{rule}; got {echo(function.get('name'))}")
    return function


def _arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | tool["function"]["parameters"]


def _one_of(tools: Any) -> dict[str, Any]:
    """The schema of an object with the name and the arguments of one of the tools. Each tool's own
    schema becomes a definition, and its references are moved there."""
    places = [f"tool{i}" for i in range(len(tools))]
    calls = [
        object_of(name={"const": tool["function"]["name"]}, arguments={"$ref": f"#/$defs/{place}"})
        | {"additionalProperties": False}
        for place, tool in zip(places, tools, strict=True)
    ]
    try:
        definitions = {
            place: _at_root(_arguments(tool), f"#/$defs/{place}")
            for place, tool in zip(places, tools, strict=True)
        }
    except RecursionError:
        raise bad_value("tools", "their parameters are nested too deep") from None
    return {"anyOf": calls, "$defs": definitions}


def _at_root(schema: Any, root: str) -> Any:
    """A copy of the schema, with its references resolved from ``root``."""
    if isinstance(schema, list):
        return [_at_root(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: _at_root(part, root) for name, part in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        copy["$ref"] = root + target[1:]
    return copy


def calls_in(calls: Any, name: str) -> list[dict[str, Any]]:
    """Earlier calls for the chat template, with their arguments parsed. Raises ApiError naming what
    is wrong."""
    if not isinstance(calls, list):
        raise bad_value(name, f"must be a list, got {echo(calls)}")
    return [_call_in(call, f"{name}[{i}]") for i, call in enumerate(calls)]


def _call_in(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_value(f"{name}.function", f"must be an object, got {echo(function)}")
    if not isinstance(function.get("name"), str):
        raise bad_value(f"{name}.function.name", f"must be text, got {echo(function.get('name'))}")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        rule = "must be an object as JSON text"
        raise bad_value(f"{name}.function.arguments", f"{rule}, got {echo(arguments)}")
    must_encode([call, parsed], name)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    called = {"name": function["name"], "arguments": parsed}
    return {**identity, "type": "function", "function": called}


def must_encode(value: Any, name: str) -> None:
    """Raise ApiError for what no JSON in UTF-8 holds, anywhere in the value: lone surrogates, and
    numbers beyond a float's range; and for what is nested too deep."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise bad_value(name, f"not valid Unicode: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise bad_value(name, f"not valid JSON: {error}") from None


def must_be_rendered(messages: list[dict[str, Any]], template: ToolTemplate) -> None:
    """Raise ApiError for calls or results that the model's chat template leaves out."""
    for i, message in enumerate(messages):
        if "tool_calls" in message and not template.calls:
            raise _omission(f"messages[{i}].tool_calls", "send the conversation without calls")
        if message["role"] == "tool" and not template.results:
            raise _omission(f"messages[{i}].role", "send what the tool said as the user's words")


def _omission(name: str, hint: str) -> ApiError:
    return unsupported(name, f"this model's chat template leaves it out; {hint}")
