"""Which tools a request has and how they may be called; calls and results in its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.tool_template import ToolTemplate
from server.api_errors import ApiError, bad_value, echo, unsupported
from server.body_schemas import STRING, object_of
from server.reply_schema import AskedSchema
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
    """Of a list of tools that look like this."""
    return {"type": ["array", "null"], "maxItems": MOST_TOOLS, "items": tool}


def choice_schema(named: dict[str, Any]) -> dict[str, Any]:
    """Of a choice among tools, one of which is named like this."""
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, named]}


ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The arguments of a tool that does not say which it takes."""


@dataclass(frozen=True, slots=True)
class AskedTools:
    """``tools``: as a chat template takes them; ``reader``: how the reply holds calls; ``schema``:
    what the reply must fit, where it is to be a call."""

    tools: tuple[dict[str, Any], ...]
    reader: CallReader
    schema: AskedSchema | None = None


async def tools_of(request: ChatRequest, service: Service) -> AskedTools | None:
    """What a chat's tools ask for; None where no call may be made. Raises ApiError naming what is
    wrong, and what neither the model's chat template nor its engine can do."""
    template = await tool_template(service) if request.tools else ToolTemplate()
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    asked = asked_tools(request.tools, choice, parallel, template)
    if asked is None or asked.schema is None:
        return asked
    able = service.runner.engine.capabilities
    if not able.grammar:
        why = f"the {able.engine} engine's replies are not held to a schema"
        raise unsupported("tool_choice", f"{why}; send 'auto' or 'none'")
    if request.ignore_eos:
        raise bad_value("ignore_eos", "leave it out with a call that must be made")
    return asked


async def tool_template(service: Service) -> ToolTemplate:
    """What the model's chat template does with tools."""
    return await service.tokenizing.run(service.text, 0, lambda own: own.tool_template)


def asked_tools(
    tools: Any, choice: Any, parallel: bool | None, template: ToolTemplate
) -> AskedTools | None:
    """What a chat's ``tools`` and ``tool_choice`` ask for; None where no call may be made. Raises
    ApiError naming what is wrong, or what the model's chat template cannot do."""
    known = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(_listed(tools)))
    names = tuple(tool["function"]["name"] for tool in known)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_value("tools", f"each name is there once, {echo(twice)} is not")
    wanted = _choice(choice, names)
    if wanted == "none" or not known:
        return None
    if wanted == "auto":
        if template.form is None:
            why = "has no tools" if not template.tools else "has calls in a form not read here"
            allowed = "send 'none', 'required' or a function's name"
            raise unsupported("tool_choice", f"'auto': this model's chat template {why}; {allowed}")
        return AskedTools(known, CallReader(template.form, names, parallel is not False))
    left = known if wanted == "required" else [known[names.index(wanted["name"])]]
    shown = known if template.tools else ()
    if len(left) == 1:
        [only] = left
        reader = CallReader("arguments", (only["function"]["name"],))
        field = f"tools[{known.index(only)}].function.parameters"
        return AskedTools(shown, reader, AskedSchema(field, _arguments(only)))
    schema = AskedSchema("tools", _one_of(left))
    return AskedTools(shown, CallReader("choice", names), schema)


def _listed(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_value("tools", f"must be a list, got {echo(tools)}")
    if len(tools) > MOST_TOOLS:
        raise bad_value("tools", f"at most {MOST_TOOLS} are allowed, got {len(tools)}")
    return tools


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """A tool with its name, description and parameters alone."""
    if not isinstance(tool, Mapping):
        raise bad_value(name, f"must be an object, got {echo(tool)}")
    if tool.get("type") != "function":
        raise unsupported(f"{name}.type", f"functions are, got {echo(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_value(f"{name}.function", f"must be an object, got {echo(function)}")
    called = function.get("name")
    if not isinstance(called, str) or not NAME.fullmatch(called):
        allowed = "1 to 64 letters, digits, '_', '-' and '.'"
        raise bad_value(f"{name}.function.name", f"must be {allowed}, got {echo(called)}")
    described = function.get("description")
    if described is not None and not isinstance(described, str):
        raise bad_value(f"{name}.function.description", f"must be text, got {echo(described)}")
    takes = function.get("parameters")
    if takes is not None and not isinstance(takes, dict):
        allowed = "must be a JSON schema of an object"
        raise bad_value(f"{name}.function.parameters", f"{allowed}, got {echo(takes)}")
    if takes and takes.get("type", "object") != "object":
        allowed = "must be 'object'"
        raise bad_value(f"{name}.function.parameters.type", f"{allowed}, got {echo(takes['type'])}")
    _must_encode(function, f"{name}.function")
    about = {} if described is None else {"description": described}
    return {
        "type": "function",
        "function": {"name": called, **about, "parameters": takes or dict(ANYTHING)},
    }


def _choice(choice: Any, names: tuple[str, ...]) -> Any:
    """``none``, ``auto``, ``required`` or the object with the one tool's name."""
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not names:
            raise bad_value("tool_choice", "there are no tools to call")
        return choice or "auto"
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "allowed_tools":
        raise unsupported("tool_choice.type", "send the tools that are allowed as tools")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        allowed = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise bad_value("tool_choice", f"must be {allowed}, got {echo(choice)}")
    if function.get("name") not in names:
        allowed = f"must be one of the tools: {', '.join(names) or 'there are none'}"
        raise bad_value("tool_choice.function.name", f"{allowed}; got {echo(function.get('name'))}")
    return function


def _arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | tool["function"]["parameters"]


def _one_of(tools: Any) -> dict[str, Any]:
    """A schema of a tool's name and its arguments. Each tool's own schema is a definition of its
    own, which its references point into."""
    places = [f"tool{i}" for i in range(len(tools))]
    calls = [
        object_of(name={"const": tool["function"]["name"]}, arguments={"$ref": f"#/$defs/{place}"})
        | {"additionalProperties": False}
        for place, tool in zip(places, tools, strict=True)
    ]
    own = {
        place: _moved(_arguments(tool), f"#/$defs/{place}")
        for place, tool in zip(places, tools, strict=True)
    }
    return {"anyOf": calls, "$defs": own}


def _moved(schema: Any, root: str) -> Any:
    """The schema where its root is at ``root``."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, root) for name, one in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved


def calls_in(calls: Any, name: str) -> list[dict[str, Any]]:
    """Earlier calls as a chat template takes them: their arguments as an object. Raises ApiError
    naming what is wrong."""
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
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        allowed = "must be an object as JSON text"
        raise bad_value(f"{name}.function.arguments", f"{allowed}, got {echo(arguments)}")
    _must_encode(call, name)
    marked = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    named = {"name": function["name"], "arguments": read}
    return {**marked, "type": "function", "function": named}


def _must_encode(value: Any, name: str) -> None:
    """Raise ApiError for half a character somewhere, which UTF-8 has not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_value(name, f"not valid Unicode: {error.reason}") from None


def must_be_rendered(messages: list[dict[str, Any]], template: ToolTemplate) -> None:
    """Raise ApiError for calls or results that the model's chat template leaves out."""
    for i, message in enumerate(messages):
        if "tool_calls" in message and not template.calls:
            raise _left_out(f"messages[{i}].tool_calls", "send the conversation without calls")
        if message["role"] == "tool" and not template.results:
            raise _left_out(f"messages[{i}].role", "send what the tool said as the user's words")


def _left_out(name: str, allowed: str) -> ApiError:
    return unsupported(name, f"this model's chat template leaves it out; {allowed}")
