"""Reads tool calls from a reply, whole or while it is drawn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.tool_template import CallForm
from server.reply_text import held_back

ForcedForm = Literal["arguments", "choice"]
"""A reply under a grammar: only the arguments of the one tool, or an object with a tool's ``name``
and its ``arguments``."""

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_CHOICE = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


class Call(NamedTuple):
    """A tool call: the tool's name and its arguments as JSON text, which may be incomplete."""

    name: str
    arguments: str


class CallsRead(NamedTuple):
    """A reply's text without its calls, and the calls."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads calls of the tools ``names``, only the first call unless ``parallel``. ``form``: how a
    reply encodes calls."""

    form: CallForm | ForcedForm
    names: tuple[str, ...]
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the reply is constrained to be a call."""
        return self.form in ("arguments", "choice")

    def read(self, text: str, *, whole: bool = True) -> CallsRead:
        """A reply's text and calls. ``whole`` False: more may come, so all that may still change is
        left out; the text and each call's arguments then only grow. What looks like a call but
        calls none of ``names`` stays text."""
        match self.form:
            case "arguments":
                return CallsRead("", (Call(self.names[0], text),) if text else ())
            case "choice":
                return CallsRead("", _choice_call(text, whole=whole))
            case "bare":
                return self._bare(text, whole=whole)
            case "tagged":
                return self._tagged(text, whole=whole)

    def _bare(self, text: str, *, whole: bool) -> CallsRead:
        """Read a reply that is either one call or text without calls."""
        if not whole and not text.strip():
            return CallsRead("")
        if not text.lstrip().startswith("{"):
            return CallsRead(text)
        call = self._call(text) if whole else None
        if call is None:
            return CallsRead(text if whole else "")
        return CallsRead("", (call,))

    def _tagged(self, text: str, *, whole: bool) -> CallsRead:
        """Read calls between tags; the text around them is joined, without the space beside."""
        content, calls, rest = "", [], text
        while OPENS in rest:
            before, _, inside = rest.partition(OPENS)
            body, end_tag, rest = inside.partition(CLOSES)
            if not end_tag and not whole:
                return CallsRead((content + before).rstrip(), tuple(calls))
            call = self._call(body)
            if call is None:
                content += before + OPENS + body + end_tag
                continue
            content = (content + before).rstrip()
            calls.append(call)
            if not self.parallel:
                return CallsRead(content, tuple(calls))
        if not whole:
            content += rest[: len(rest) - held_back(rest, (OPENS,))]
            return CallsRead(content.rstrip(), tuple(calls))
        return CallsRead((content + rest).rstrip() if calls else content + rest, tuple(calls))

    def _call(self, body: str) -> Call | None:
        """Parse a call's JSON; None if it is not a call of one of the tools."""
        try:
            call = json.loads(body)
            if not isinstance(call, dict) or call.get("name") not in self.names:
                return None
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            return Call(call["name"], json.dumps(arguments, ensure_ascii=False))
        except (ValueError, RecursionError):
            return None


def _choice_call(text: str, *, whole: bool) -> tuple[Call, ...]:
    """The call in an object with a name and arguments. A last brace that may close the object, and
    space before it, are left out of the arguments."""
    match = _CHOICE.match(text)
    if match is None:
        return ()
    arguments = text[match.end() :].rstrip()
    complete = arguments.endswith("}") and (not whole or _is_json(text))
    return (Call(json.loads(match[1]), (arguments[:-1] if complete else arguments).rstrip()),)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class CallDelta(NamedTuple):
    """The new part of the call at ``place``; ``name``: only in its first part."""

    place: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class CallStream:
    """Tracks how much of the text and of each call has been sent, for one choice of a stream."""

    reader: CallReader
    _text: int = 0
    _calls: list[int] = field(default_factory=list)

    @property
    def has_calls(self) -> bool:
        """Whether a call has been sent."""
        return bool(self._calls)

    def more(self, text: str, *, whole: bool) -> tuple[str, list[CallDelta]]:
        """The new text and call parts, with a reply's whole ``text`` so far."""
        parts = self.reader.read(text, whole=whole)
        new, self._text = parts.text[self._text :], max(self._text, len(parts.text))
        deltas = []
        for index, call in enumerate(parts.calls):
            if index == len(self._calls):
                self._calls.append(len(call.arguments))
                deltas.append(CallDelta(index, call.name, call.arguments))
            elif more := call.arguments[self._calls[index] :]:
                self._calls[index] += len(more)
                deltas.append(CallDelta(index, None, more))
        return new, deltas
