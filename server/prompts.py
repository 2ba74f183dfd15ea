"""Builds prompts: a chat's messages under the model's chat template, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from runtime.profiles import Profile
from runtime.text import Text
from search.engine import PrefixTooLong
from search.problem import Problem
from server.api_errors import bad_value, beyond_context, echo, prompt_too_long, unsupported
from server.api_keys import ApiKey
from server.reply_text import opens_reasoning
from server.request_models import ChatRequest, Message, Prompt, encodable
from server.tool_requests import calls_in, must_be_rendered, tool_template

if TYPE_CHECKING:
    from server.service import Service


def plain_messages(messages: list[Message], most: int) -> list[dict[str, Any]]:
    """Convert messages for the chat template: text parts are joined, ``developer`` becomes
    ``system``, the arguments of earlier tool calls become objects.

    Raises ApiError naming the message and the part that is invalid.
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


def must_continue(request: ChatRequest, messages: list[dict[str, Any]], *, searched: bool) -> bool:
    """Whether the reply continues the last message. Raises ApiError if it cannot."""
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
    """The question for reward models and tasks: the user's last message, else the last one."""
    questions = [message["content"] for message in messages if message["role"] == "user"]
    return questions[-1] if questions else messages[-1]["content"]


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


def under_profile(
    messages: Sequence[Mapping[str, Any]], profile: Profile
) -> list[Mapping[str, Any]]:
    """The messages that a search sends to the model: the profile's system message comes first if
    they have none of their own."""
    if profile.system is None or any(message["role"] == "system" for message in messages):
        return list(messages)
    return [{"role": "system", "content": profile.system}, *messages]


async def build_prompt(
    messages: list[dict[str, Any]],
    service: Service,
    key: ApiKey,
    *,
    searched: bool,
    continues: bool = False,
    tools: Sequence[dict[str, Any]] = (),
    field: str = "messages",
) -> Problem:
    """Encode messages under the chat template, for a search with the profile's system message.
    ``continues``: the reply continues the last message; ``tools``: those the model may call;
    ``field``: what the client gave them in. Raises ApiError if the prompt exceeds the context, or
    for a tool call that the template leaves out."""
    conversation = under_profile(messages, service.profile) if searched else messages
    if any("tool_calls" in message or message["role"] == "tool" for message in conversation):
        must_be_rendered(messages, await tool_template(service))
    size = sum(len(message["content"]) for message in conversation)
    more: dict[str, Any] = {"open_reply": True} if continues else {}
    if tools:
        more["tools"], size = tools, size + len(repr(tools))

    def encode(text: Text) -> list[int]:
        return text.encode_chat(conversation, **more)

    try:
        prompt = await _tokens(encode, size, field, service, key)
    except (TemplateError, ValueError) as error:
        raise bad_value(field, f"the model's chat template refuses them: {error}") from None
    return Problem(prompt, question_of(messages), service.profile.delimiter)


async def _tokens(
    encode: Callable[[Text], list[int]], size: int, field: str, service: Service, key: ApiKey
) -> tuple[int, ...]:
    """Encode a prompt of ``size`` characters. Raises ApiError if it is too long or empty."""
    try:
        prompt = await service.tokenizing.run(service.text, size, encode)
    except PrefixTooLong as error:
        raise beyond_context(field, str(error)) from None
    context = service.runner.engine.capabilities.context_tokens
    if len(prompt) >= context:
        raise prompt_too_long(len(prompt), context, field)
    if len(prompt) > key.prompt_tokens:
        raise bad_value(field, f"at most {key.prompt_tokens} tokens, these are {len(prompt)}")
    if not prompt:
        raise bad_value(field, "nothing to reply to")
    return tuple(prompt)


async def prompt_tokens(
    field: str, prompt: Prompt, service: Service, key: ApiKey
) -> tuple[int, ...]:
    """The ids of a text completion's prompt. Raises ApiError for ids outside the vocabulary."""
    if isinstance(prompt, str):
        size = len(prompt)
        return await _tokens(lambda text: text.encode_prompt(prompt), size, field, service, key)
    most = service.text.model_vocab - 1
    if wrong := [token for token in prompt if not 0 <= token <= most]:
        raise bad_value(field, f"token ids are from 0 to {most}, got {echo(wrong[0])}")
    return await _tokens(lambda _: list(prompt), 0, field, service, key)


def thinks(prompt: Sequence[int], service: Service) -> bool:
    """Whether the prompt opens the reply's thought because the chat template does so, not because a
    message ends with the tag."""
    return service.thinks and opens_reasoning(prompt, service.text.encode)
