"""Finds out what a chat template does with tools, from what it renders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Tools | None], str]
CallForm = Literal["tagged", "bare"]
"""``tagged``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them amid
text, as Qwen's and Hermes' models write; ``bare``: ``{"name": ..., "parameters": {...}}`` is the
whole reply, as Llama 3's do."""

_NAME, _VALUE, _RESULT = "probe_function", "probe_value", "probe_result"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Asks.",
        "parameters": {"type": "object", "properties": {"it": {"type": "string"}}},
    },
}
_CALL: Mapping[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": _NAME, "arguments": {"it": _VALUE}},
}
_QUESTION: Messages = ({"role": "user", "content": "?"},)
_WITH_CALL: Messages = (*_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]})
_WITH_RESULT: Messages = (
    *_WITH_CALL,
    {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": _RESULT},
)
_BARE = rf'\{{\s*"name":\s*"{_NAME}",\s*"(arguments|parameters)":\s*\{{'


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """``tools``: it tells the model which tools there are; ``calls``: it renders earlier calls;
    ``results``: it renders the results of tools. ``form``: how it renders calls, and so how the
    model writes them; None: it does not, or in a form that cannot be read here."""

    tools: bool = False
    calls: bool = False
    results: bool = False
    form: CallForm | None = None


def read_tool_template(render: Render) -> ToolTemplate:
    """Find out what a template does, by rendering a conversation with a call; ``render`` may raise
    what templates raise for input that they were not written for."""
    question = _rendered(render, _QUESTION)
    call, answer = _rendered(render, _WITH_CALL), _rendered(render, _WITH_RESULT)
    return ToolTemplate(
        tools=_NAME in question,
        calls=_VALUE in call,
        results=_RESULT in answer,
        form=_form(call) if _NAME in question else None,
    )


def _rendered(render: Render, messages: Messages) -> str:
    try:
        return render(messages, [_TOOL])
    except (TemplateError, ValueError, TypeError, KeyError):
        return ""


def _form(text: str) -> CallForm | None:
    if re.search(rf"<tool_call>\s*{_BARE}", text):
        return "tagged"
    bare = re.search(_BARE, text)
    return "bare" if bare is not None and bare[1] == "parameters" else None
