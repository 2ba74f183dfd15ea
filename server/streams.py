"""Server-sent events: what a stream may say already, and ending it honestly."""

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
"""What a route's document says that may answer with a stream."""
DONE = b"data: [DONE]\n\n"
on_one_line = json.JSONEncoder(separators=(",", ":")).encode
"""Made once; ``json.dumps`` makes its encoder anew for every event."""


def event(data: Any, name: str | None = None, number: int | None = None) -> bytes:
    """One server-sent event with JSON data on one line."""
    lines = [f"id: {number}"] if number is not None else []
    if name is not None:
        lines.append(f"event: {name}")
    lines.append(f"data: {on_one_line(data)}")
    return ("\n".join(lines) + "\n\n").encode()


class EventStream(StreamingResponse):
    """Sends events as they come, until it is cancelled: the middleware sees to that."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        async with aclosing(self._events):
            await self.stream_response(send)


class StablePrefix:
    """Follows a search by its events.

    The reply is a finished trajectory or grows from an open leaf, so it begins with what all of
    these have in common. Where the root may grow again nothing of the reply is certain before the
    end.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._tree: Tree | None = None
        self._goes_back = returns_to_root(POLICIES[spec.policy](spec))

    def on_event(self, event: Event) -> None:
        """Take in the search's next event."""
        if isinstance(event, Started):
            self._tree = None if self._goes_back else Tree(event.prompt)
        elif self._tree is not None:
            grow(self._tree, event)

    def text(self) -> str:
        """What the reply begins with. Between rounds; it only grows as long as anything lives."""
        tree = self._tree
        if tree is None:
            return ""
        return shared([tree.text(node.id) for node in (*tree.leaves(), *tree.finished())])


def shared(texts: Sequence[str]) -> str:
    """What all texts begin with; of none that is nothing."""
    first, last = min(texts, default=""), max(texts, default="")
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), len(first))]


LONGEST_STEP = 80


class Progress:
    """Sums up each round of a search in a line once the next begins; ``text``: all lines so far."""

    def __init__(self) -> None:
        self.text = ""
        self._round = 0
        self._steps: dict[int, str] = {}
        self._best: tuple[float, str] | None = None
        self._finished = 0

    def on_event(self, event: Event) -> str | None:
        """Take in an event; the line of the round that is over with it, if one is."""
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
    """What is new of a choice: of its thought, of its reply, and of the calls in it."""

    thought: str
    text: str
    calls: Sequence[CallDelta] = ()


class ReplyStream:
    """One choice of a stream: what has been sent of its thought, of its reply and of its calls."""

    def __init__(self, in_reasoning: bool | None, reader: CallReader | None = None) -> None:
        """``opened`` None: nothing is a thought here; ``reader`` None: nothing is a call."""
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
        """What is new with ``text``."""
        self._text += text
        return self._new(self._text, whole=False)

    def rest(self, text: str) -> Parts:
        """What has not been sent yet, now that the whole ``text`` is known."""
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
