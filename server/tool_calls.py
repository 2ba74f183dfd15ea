"""How calls of tools are read out of a reply, whole or while it grows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.tool_template import CallForm
from server.reply_text import held_back

ForcedForm = Literal["arguments", "choice"]
"""A reply under a grammar: the arguments of the one tool alone, or an object with a tool's
``name`` and its ``arguments``."""

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_CHOICE = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


class Call(NamedTuple):
    """A call: a tool's name, and its arguments as JSON text, as far as they go."""

    name: str
    arguments: str


class CallsRead(NamedTuple):
    """What a reply says beside its calls, and these."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads calls of tools with these ``names``, the first alone unless ``parallel``. ``form``:
    how the reply holds them."""

    form: CallForm | ForcedForm
    names: tuple[str, ...]
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the reply is a call whatever the model would say."""
        return self.form in ("arguments", "choice")

    def read(self, text: str, *, whole: bool = True) -> CallsRead:
        """A reply's text and calls. ``whole`` False: more may come, and what it might still change
        is left out; the text and each call's arguments then only grow. What looks like a call and
        is none of a tool that was named stays text."""
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
        """The reply is one call, or no call is in it."""
        if not whole and not text.strip():
            return CallsRead("")
        if not text.lstrip().startswith("{"):
            return CallsRead(text)
        call = self._call(text) if whole else None
        if call is None:
            return CallsRead(text if whole else "")
        return CallsRead("", (call,))

    def _tagged(self, text: str, *, whole: bool) -> CallsRead:
        """Text before, between and after calls is one; the space around them is not part of it."""
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
        """A call's JSON read; None for what is none."""
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
    """The call in an object of a name and arguments. The object's own end, and space before it, are
    left out as soon as they may be it."""
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
    """What is new of the call at ``place``; ``name``: where it begins."""

    place: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class CallStream:
    """One choice of a stream: what has been sent of its text and of its calls."""

    reader: CallReader
    _text: int = 0
    _calls: list[int] = field(default_factory=list)

    @property
    def has_calls(self) -> bool:
        """Whether a call has been sent."""
        return bool(self._calls)

    def more(self, text: str, *, whole: bool) -> tuple[str, list[CallDelta]]:
        """What is new with a reply's ``text`` as far as it goes."""
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
