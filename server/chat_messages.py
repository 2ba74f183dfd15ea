"""A chat's messages as a model is asked them."""

from __future__ import annotations

from typing import Any

from server.api_errors import bad_value, echo, unsupported
from server.request_models import ChatRequest, Message, encodable
from server.tool_requests import calls_in


def plain_messages(messages: list[Message], most: int) -> list[dict[str, Any]]:
    """Messages as the chat template takes them: text parts joined, developer as system, earlier
    calls of tools with their arguments as objects.

    Raises ApiError naming the message and the part that cannot be.
    """
    if len(messages) > most:
        raise bad_value("messages", f"at most {most} messages are allowed, got {len(messages)}")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, name: str) -> dict[str, Any]:
    if message.function_call is not None:
        raise unsupported(f"{name}.function_call", "leave it out or send tool_calls")
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content, f"{name}.content")}
    if message.tool_calls not in (None, []):
        if role != "assistant":
            raise bad_value(f"{name}.tool_calls", f"the assistant's messages have them, not {role}")
        plain["tool_calls"] = calls_in(message.tool_calls, f"{name}.tool_calls")
    if role == "tool":
        for field in ("tool_call_id", "name"):
            if isinstance(value := getattr(message, field), str):
                plain[field] = encodable(value, f"{name}.{field}")
    return plain


def goes_on(request: ChatRequest, messages: list[dict[str, Any]], *, searched: bool) -> bool:
    """Whether the reply is the rest of the last message. Raises ApiError where it cannot be."""
    name, starts = "continue_final_message", request.add_generation_prompt
    if not request.continue_final_message:
        if starts is False:
            raise unsupported("add_generation_prompt", f"leave it out, or send {name} true too")
        return False
    if starts:
        raise bad_value("add_generation_prompt", f"must be false where {name} is true")
    if searched:
        raise unsupported(name, "leave it out with a search; POST /v1/search/ID/branch goes on")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise bad_value(name, "the last message must be the assistant's and not empty")
    return True


def question_of(messages: list[dict[str, Any]]) -> str:
    """What a reward model and a task see: the last thing the user said."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else messages[-1]["content"]


def _text(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content, name)
    if not isinstance(content, list):
        raise bad_value(name, f"must be a string, null or a list of text parts: {echo(content)}")
    return "".join(_part(part, f"{name}[{j}]") for j, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise bad_value(f"{name}.type", f"must be 'text', got {echo(kind)}")
    if not isinstance(part.get("text"), str):
        raise bad_value(f"{name}.text", f"must be a string, got {echo(part.get('text'))}")
    return encodable(part["text"], f"{name}.text")
