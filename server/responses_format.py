"""Formats answers of ``POST /v1/responses``: OpenAI's response object and its stream's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.text import Text
from server.replies import CompletedReply
from server.reply_logprobs import ReplyToken, chat_logprobs
from server.request_parsing import ParsedRequest
from server.responses_request import ResponsesRequest
from server.streams import Parts
from server.tool_calls import Call, CallDelta

Json = dict[str, Any]


class ResponseFormat:
    """Formats the response to one request, whole or in progress. Nothing is stored."""

    def __init__(
        self, request: ResponsesRequest, parsed: ParsedRequest, fingerprint: str, text: Text
    ) -> None:
        self._parsed = parsed
        self._text = text
        self._number = parsed.id.partition("-")[2]
        effort = request.reasoning.effort if request.reasoning else None
        self._head: Json = {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": parsed.created,
            "model": parsed.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "reasoning": {"effort": effort, "summary": None},
            "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "metadata": {},
            "seed": parsed.seed,
            "system_fingerprint": fingerprint,
        }

    def in_progress(self) -> Json:
        """The response object at the start of a stream, without output."""
        more = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return self._head | {"status": "in_progress"} | more

    def response(self, reply: CompletedReply) -> Json:
        """The finished response."""
        [(_, finish), *_] = reply.choices
        thought, content = reply.parts(0)
        reasoning = reply.rounds + thought
        tokens = reply.logprobs[0] if reply.logprobs else ()
        output = [self.reasoning_item(reasoning)] if reasoning else []
        parts = self._parsed.read_calls(content)
        if parts.text or not parts.calls:
            output.append(self.message_item(parts.text, tokens, finish))
        output += [self.call_item(i, call, finish) for i, call in enumerate(parts.calls)]
        cut = {"reason": "max_output_tokens"} if finish == "length" else None
        body = self._head | {"status": status_of(finish), "error": None, "incomplete_details": cut}
        body |= {"output": output, "usage": _usage(reply.usage)}
        return body if reply.search is None else body | {"search": reply.search}

    def reasoning_item(self, text: str | None) -> Json:
        """The item of a thought; ``text`` None: the thought has just begun."""
        content = [] if text is None else [reasoning_part(text)]
        status = "in_progress" if text is None else "completed"
        item = {"type": "reasoning", "id": f"rs_{self._number}", "summary": []}
        return item | {"content": content, "status": status}

    def message_item(
        self, text: str | None, tokens: Sequence[ReplyToken] = (), finish: str = "stop"
    ) -> Json:
        """The item of the reply; ``text`` None: the reply has just begun."""
        content = [] if text is None else [self.text_part(text, tokens)]
        status = "in_progress" if text is None else status_of(finish)
        item = {"type": "message", "id": f"msg_{self._number}", "role": "assistant"}
        return item | {"content": content, "status": status}

    def call_item(self, place: int, call: Call, finish: str | None = None) -> Json:
        """The item of a tool call; ``finish`` None: the call is in progress."""
        identity = {"call_id": self._parsed.call_id(0, place), "name": call.name}
        status = "in_progress" if finish is None else status_of(finish)
        item = {"type": "function_call", "id": f"fc_{self._number}_{place}", **identity}
        return item | {"arguments": call.arguments, "status": status}

    def text_part(self, text: str, tokens: Sequence[ReplyToken] = ()) -> Json:
        """The content part of a reply's text, with its log-probabilities."""
        logprobs = self.logprobs(tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @property
    def forced(self) -> bool:
        """Whether the request forces the reply to be a tool call."""
        return self._parsed.calls is not None and self._parsed.calls.forced

    def logprobs(self, tokens: Sequence[ReplyToken]) -> list[Json]:
        """The log-probabilities of these tokens, as a chat has them."""
        return chat_logprobs(tokens, self._text)["content"]


class ResponseEvents:
    """Makes the numbered events of one stream. A thought is an item of its own, which ends where
    the reply begins."""

    def __init__(self, formatter: ResponseFormat) -> None:
        self._formatter = formatter
        self._count = 0
        self._thought: str | None = None
        self._thought_ended = False
        self._replied = False
        self._calls: list[Call] = []
        """The calls that were begun, with the arguments sent so far."""

    def opening(self) -> list[Json]:
        """The events sent before anything is drawn."""
        in_progress = self._formatter.in_progress()
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=in_progress) for kind in kinds]

    def more(self, parts: Parts, tokens: Sequence[ReplyToken] | None = None) -> list[Json]:
        """The events for new parts of a choice, any of which may be empty; unforced calls are sent
        by ``ending``. ``tokens``: those whose log-probabilities are sent with the text."""
        events = self._thinking(parts.thought) if parts.thought else []
        if parts.text:
            events += self._replying(parts.text, tokens or ())
        if self._formatter.forced:
            for delta in parts.calls:
                events += self._calling(delta)
        return events

    def ending(self, reply: CompletedReply) -> list[Json]:
        """The last events, after all text was sent by ``more``."""
        response, events = self._formatter.response(reply), []
        for item in response["output"]:
            if item["type"] == "message":
                events += self._end_reply(item)
            if item["type"] == "function_call":
                events += self._end_call(item)
        status = "completed" if response["status"] == "completed" else "incomplete"
        return [*events, self._event(f"response.{status}", response=response)]

    def _end_reply(self, item: Json) -> list[Json]:
        events = [] if self._replied else self._begin_reply()
        [part] = item["content"]
        place = self._place(item)
        text, logprobs = part["text"], part["logprobs"]
        done_event = self._event("response.output_text.done", **place, text=text, logprobs=logprobs)
        events.append(done_event)
        events.append(self._event("response.content_part.done", **place, part=part))
        return [*events, self._item_event("done", item)]

    def _calling(self, delta: CallDelta) -> list[Json]:
        events = []
        if delta.name is not None:
            call = Call(delta.name, "")
            events += [] if self._calls else self._end_thought()
            self._calls.append(call)
            events.append(self._item_event("added", self._formatter.call_item(delta.place, call)))
        call = self._calls[delta.place]
        self._calls[delta.place] = Call(call.name, call.arguments + delta.arguments)
        if not delta.arguments:
            return events
        item = self._formatter.call_item(delta.place, call)
        place = {"item_id": item["id"], "output_index": self._index(item)}
        kind = "response.function_call_arguments.delta"
        return [*events, self._event(kind, **place, delta=delta.arguments)]

    def _end_call(self, item: Json) -> list[Json]:
        """The end of a call that was begun, or all events of one that was not."""
        number, events = int(item["id"].rpartition("_")[2]), []
        if number == len(self._calls):
            events = self._calling(CallDelta(number, item["name"], item["arguments"]))
        more = {"arguments": item["arguments"], "name": item["name"]}
        place = {"item_id": item["id"], "output_index": self._index(item)}
        done_event = self._event("response.function_call_arguments.done", **place, **more)
        return [*events, done_event, self._item_event("done", item)]

    def error(self, error: Json) -> Json:
        """The event for a stream that fails."""
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _thinking(self, thought: str) -> list[Json]:
        events, item = [], self._formatter.reasoning_item(None)
        place = self._place(item)
        if self._thought is None:
            self._thought = ""
            events.append(self._item_event("added", item))
            part = reasoning_part("")
            events.append(self._event("response.content_part.added", **place, part=part))
        self._thought += thought
        return [*events, self._event("response.reasoning_text.delta", **place, delta=thought)]

    def _end_thought(self) -> list[Json]:
        if self._thought is None or self._thought_ended:
            return []
        self._thought_ended, item = True, self._formatter.reasoning_item(self._thought)
        place, [part] = self._place(item), item["content"]
        return [
            self._event("response.reasoning_text.done", **place, text=self._thought),
            self._event("response.content_part.done", **place, part=part),
            self._item_event("done", item),
        ]

    def _begin_reply(self) -> list[Json]:
        self._replied, item = True, self._formatter.message_item(None)
        place, part = self._place(item), self._formatter.text_part("")
        events = [*self._end_thought(), self._item_event("added", item)]
        return [*events, self._event("response.content_part.added", **place, part=part)]

    def _replying(self, text: str, tokens: Sequence[ReplyToken]) -> list[Json]:
        events = [] if self._replied else self._begin_reply()
        place = self._place(self._formatter.message_item(None))
        logprobs = self._formatter.logprobs(tokens)
        delta = self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
        return [*events, delta]

    def _place(self, item: Json) -> Json:
        """The position fields of an item's only content part."""
        return {"item_id": item["id"], "output_index": self._index(item), "content_index": 0}

    def _index(self, item: Json) -> int:
        """An item's output index: the thought comes first, then the reply, then its calls."""
        before = 0 if item["type"] == "reasoning" else int(self._thought is not None)
        if item["type"] != "function_call":
            return before
        return before + int(self._replied) + int(item["id"].rpartition("_")[2])

    def _item_event(self, kind: str, item: Json) -> Json:
        name = f"response.output_item.{kind}"
        return self._event(name, output_index=self._index(item), item=item)

    def _event(self, kind: str, **more: Any) -> Json:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **more}


def reasoning_part(text: str) -> Json:
    """The content part of a thought's text."""
    return {"type": "reasoning_text", "text": text}


def status_of(finish: str) -> str:
    """The status of an item or response by the finish of its reply."""
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Json) -> Json:
    """A completion's usage with the field names of a response."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": usage["total_tokens"],
    }
