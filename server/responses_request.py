"""The request body of ``POST /v1/responses``, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, WithJsonSchema, model_validator

from search.engine import LOGITS_PARAMS
from server.api_errors import ApiError, bad_value, echo, unsupported
from server.body_schemas import STRING, object_of, of_type
from server.reply_schema import TEXT_FORMAT_SCHEMA
from server.request_models import (
    MOST_MESSAGES,
    ChatRequest,
    Count,
    Reasoning,
    SamplingParameters,
    Seed,
    Spec,
    Temperature,
    TopLogprobs,
    TopP,
    only_names_of_unread,
)
from server.responses_tools import call_of, chat_choice, chat_tools, join_calls, result_of
from server.tool_requests import FUNCTION_SCHEMA, choice_schema, must_encode, tools_schema
from server.unsupported_parameters import RESPONSES

Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""What ``include`` may name; reasoning items are always complete and never encrypted."""
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "include",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""The names here of a chat request's fields."""
_PART_SCHEMA = object_of(type={"enum": list(TEXT_PARTS)}, text=STRING)
_CONTENT_SCHEMA = {"anyOf": [STRING, {"type": "array", "items": _PART_SCHEMA}]}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": list(ROLES)},
        "content": _CONTENT_SCHEMA,
    },
    "required": ["role", "content"],
}
_CALL_SCHEMA = of_type("function_call", call_id=STRING, name=STRING, arguments=STRING)
_RESULT_SCHEMA = of_type("function_call_output", call_id=STRING, output=_CONTENT_SCHEMA)
_ITEM_SCHEMA = {"anyOf": [_MESSAGE_SCHEMA, _CALL_SCHEMA, _RESULT_SCHEMA]}
_INPUT_SCHEMA = {
    "anyOf": [
        {**STRING, "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": _ITEM_SCHEMA},
    ]
}
_TOOL_SCHEMA = of_type("function", **FUNCTION_SCHEMA["properties"]) | {"required": ["type", "name"]}
_TOOLS_SCHEMA = tools_schema(_TOOL_SCHEMA)
_CHOICE_SCHEMA = choice_schema(of_type("function", name=STRING))
_TEXT_SCHEMA = {
    "type": ["object", "null"],
    "properties": {"format": TEXT_FORMAT_SCHEMA, "verbosity": {"const": "medium"}},
}


class RequestedReasoning(Reasoning):
    """``summary``: any value makes a search report each round."""

    summary: str | None = None


class ResponsesRequest(SamplingParameters):
    """Request body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: Count | None = Field(
        default=None, description="maximum tokens per trajectory"
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Included] | None = Field(default=None, max_length=16)
    reasoning: RequestedReasoning | None = None
    tools: Annotated[Any, WithJsonSchema(_TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: StrictBool | None = None
    text: Annotated[Any, WithJsonSchema(_TEXT_SCHEMA)] = None
    seed: Seed | None = Field(default=None, description="random seed, taken modulo 2**63")
    stream: StrictBool | None = None
    search: Spec | None = None

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, data: object) -> object:
        return only_names_of_unread(data, cls.model_fields.keys() | RESPONSES.keys())

    def chat(self) -> ChatRequest:
        """Convert to a chat request. Raises ApiError naming a field that cannot be converted."""
        for name in ("tools", "tool_choice", "text"):  # the response repeats them
            must_encode(getattr(self, name), name)
        more = {name: getattr(self, name) for name in ("search", "seed", "temperature", "top_p")}
        more |= {name: getattr(self, name) for name in LOGITS_PARAMS}
        logprobs = "message.output_text.logprobs" in (self.include or [])
        return ChatRequest(
            model=self.model,
            messages=messages_of(self.instructions, self.input),  # type: ignore[arg-type]
            max_completion_tokens=self.max_output_tokens,
            reasoning=self.reasoning,
            include_reasoning=bool(self.reasoning and self.reasoning.summary),
            logprobs=logprobs,
            top_logprobs=self.top_logprobs if logprobs else None,
            response_format=_format_of(self.text),
            tools=chat_tools(self.tools),
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            **more,
        )


def messages_of(instructions: str | None, content: Any) -> list[dict[str, Any]]:
    """The chat messages of ``input``, instructions first. Raises ApiError naming a wrong item."""
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(content, str):
        if not content:
            raise bad_value("input", "must not be empty")
        return [*first, {"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise bad_value("input", f"must be text or a list of messages, got {echo(content)}")
    if len(content) > MOST_MESSAGES:
        raise bad_value("input", f"at most {MOST_MESSAGES} items are allowed, got {len(content)}")
    items = [_message(item, f"input[{i}]") for i, item in enumerate(content)]
    messages = [item for item in items if item is not None]
    if not messages:
        raise bad_value("input", "at least one message is needed")
    return [*first, *join_calls(messages)]


def _items_of_messages(request: ResponsesRequest) -> list[str]:
    """The field or item here that each message of the chat request begins with."""
    names = ["instructions"] if request.instructions else []
    if not isinstance(request.input, list):
        return [*names, "input"]
    assistant = False
    for i, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind != "function_call" or not assistant:  # else it was joined to the message before
            names.append(f"input[{i}]")
        assistant = kind == "function_call" or item.get("role") == "assistant"
    return names


def _message(item: Any, name: str) -> dict[str, Any] | None:
    """An item as a chat message; None for earlier reasoning, which chat templates leave out."""
    if not isinstance(item, Mapping):
        raise bad_value(name, f"must be an object, got {echo(item)}")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        return call_of(item, name)
    if kind == "function_call_output":
        return result_of(item, name, _content(item.get("output"), f"{name}.output"))
    if kind != "message":
        rule = "messages, reasoning items, calls of functions and their outputs are read"
        raise unsupported(f"{name}.type", rule)
    role = item.get("role")
    if role not in ROLES:
        raise bad_value(f"{name}.role", f"must be one of {', '.join(ROLES)}, got {echo(role)}")
    return {"role": role, "content": _content(item.get("content"), f"{name}.content")}


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value(name, f"must be text or a list of parts, got {echo(content)}")
    return "".join(_part(part, f"{name}[{i}]") for i, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise bad_value(f"{name}.type", f"must be one of {', '.join(TEXT_PARTS)}, got {echo(kind)}")
    if not isinstance(part.get("text"), str):
        raise bad_value(f"{name}.text", f"must be a string, got {echo(part.get('text'))}")
    return part["text"]


def _format_of(text: Any) -> Any:
    """The format in ``text`` as a chat's ``response_format``. Raises ApiError."""
    if text is None:
        return None
    if not isinstance(text, Mapping):
        raise bad_value("text", f"must be an object, got {echo(text)}")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", "leave it out or send 'medium'")
    form = text.get("format")
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def rename_field(error: ApiError, request: ResponsesRequest) -> ApiError:
    """A chat request's error with its field named as in this request, where the parts of a tool
    are not inside ``function``."""
    name = error.param or ""
    items = _items_of_messages(request) if name.startswith("messages[") else []
    names = {f"messages[{i}]": item for i, item in enumerate(items)} | NAMES
    stem = next(
        (key for key in names if name == key or name.startswith((f"{key}[", f"{key}."))), None
    )
    if stem is not None:
        param = names[stem] + name.removeprefix(stem)
    elif name.startswith(("tools", "tool_choice")):
        param = name.replace(".function", "", 1)
    else:
        return error
    message = str(error.detail).replace(name, param, 1)
    return ApiError(error.status_code, error.code, message, param=param, headers=error.headers)
