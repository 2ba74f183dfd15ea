"""Server-sent events: encoding, and which text of a growing reply is already certain."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from search.events import Answered, Event, Expanded, Finished, Scored, Started, grow
from search.policies.registry import POLICIES, returns_to_root
from search.spec import SearchSpec
from search.tree import Tree
from server.reply_text import split_reasoning
from server.tool_calls import CallDelta, CallReader, CallStream

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
OR_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The OpenAPI responses of a route that may answer with a stream."""
DONE = b"data: [DONE]\n\n"
on_one_line = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes JSON without spaces; ``json.dumps`` would create an encoder at each call."""


def event(data: Any, name: str | None = None, number: int | None = None) -> bytes:
    """Encode a server-sent event with JSON data on one line."""
    lines = [f"id: {number}"] if number is not None else []
    if name is not None:
        lines.append(f"event: {name}")
    lines.append(f"data: {on_one_line(data)}")
    return ("\n".join(lines) + "\n\n").encode()


class EventStream(StreamingResponse):
    """Sends events as they come; the middleware cancels it when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then close the generator of events."""
        async with aclosing(self._events):
            await self.stream_response(send)


class StablePrefix:
    """Follows a search by its events, to know how its reply begins.

    The reply is a finished trajectory or grows from an open leaf, so it begins with what all of
    these have in common. If the policy may return to the root, no text is certain before the end.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._tree: Tree | None = None
        self._goes_back = returns_to_root(POLICIES[spec.policy](spec))

    def on_event(self, event: Event) -> None:
        """Apply the search's next event to the tree."""
        if isinstance(event, Started):
            self._tree = None if self._goes_back else Tree(event.prompt)
        elif self._tree is not None:
            grow(self._tree, event)

    def text(self) -> str:
        """The certain beginning of the reply, between rounds; it grows as long as a leaf lives."""
        tree = self._tree
        if tree is None:
            return ""
        return shared([tree.text(node.id) for node in (*tree.leaves(), *tree.finished())])


def shared(texts: Sequence[str]) -> str:
    """The longest common prefix of the texts; empty if there are none."""
    first, last = min(texts, default=""), max(texts, default="")
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), len(first))]


LONGEST_STEP = 80


class Progress:
    """Makes a line about each round of a search when it is over; ``text``: all lines so far."""

    def __init__(self) -> None:
        self.text = ""
        self._round = 0
        self._steps: dict[int, str] = {}
        self._best: tuple[float, str] | None = None
        self._finished = 0

    def on_event(self, event: Event) -> str | None:
        """Note an event; return the line of the round that it ends, or None."""
        number = getattr(event, "round", self._round)
        over = isinstance(event, Answered) or number != self._round
        line = self._line() if over and self._steps else None
        self.text += line or ""
        if over:
            self._round, self._steps, self._best = number, {}, None
        match event:
            case Expanded():
                self._steps[event.node] = " ".join(event.text.split())[:LONGEST_STEP]
            case Scored() if self._best is None or event.reward > self._best[0]:
                self._best = event.reward, self._steps[event.node]
            case Finished():
                self._finished += 1
        return line

    def _line(self) -> str:
        best = "" if self._best is None else f"; best {self._best[0]:.2f}: {self._best[1]}"
        return f"round {self._round}: {len(self._steps)} steps, {self._finished} finished{best}\n"


class Parts(NamedTuple):
    """The new parts of a choice: of its thought, of its reply, and of the calls in it."""

    thought: str
    text: str
    calls: Sequence[CallDelta] = ()


class ReplyStream:
    """Splits one choice of a stream into parts, and tracks how much of each has been sent."""

    def __init__(self, in_reasoning: bool | None, reader: CallReader | None = None) -> None:
        """``in_reasoning`` None: replies have no thoughts; ``reader`` None: they have no calls."""
        self._in_reasoning = in_reasoning
        self._text = ""
        self._thought = 0
        self._reply = 0
        self._calls = None if reader is None else CallStream(reader)

    @property
    def called(self) -> bool:
        """Whether a call has been sent."""
        return self._calls is not None and self._calls.has_calls

    def more(self, text: str) -> Parts:
        """The new parts after ``text`` is appended."""
        self._text += text
        return self._new(self._text, whole=False)

    def rest(self, text: str) -> Parts:
        """The parts not sent yet, now that the whole ``text`` is known."""
        assert text.startswith(self._text), "what was sent as certain has changed"
        return self._new(text, whole=True)

    def _new(self, text: str, *, whole: bool) -> Parts:
        if self._in_reasoning is None:
            thought, reply = "", text
        else:
            thought, reply = split_reasoning(text, opened=self._in_reasoning, whole=whole)
        more, self._thought = thought[self._thought :], len(thought)
        if self._calls is not None:
            return Parts(more, *self._calls.more(reply, whole=whole))
        new, self._reply = reply[self._reply :], len(reply)
        return Parts(more, new)
