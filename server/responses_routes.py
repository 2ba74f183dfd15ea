"""``POST /v1/responses``: OpenAI's Responses API over plain replies and searched ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.admission import QueueSlot
from server.api_errors import ApiError, StreamAborted, translate
from server.chat_routes import reply_in_turn
from server.middleware import forget_body
from server.replies import CompletedReply
from server.reply_events import Certain, ReasoningPart, Tell
from server.request_models import refuse_unsupported
from server.request_parsing import ParsedRequest, parse_chat
from server.responses_format import ResponseEvents, ResponseFormat
from server.responses_request import ResponsesRequest, rename_field
from server.search_runner import Silence, WorkDone
from server.service import Service
from server.streams import OR_EVENTS, EventStream, Parts, ReplyStream, event
from server.unsupported_parameters import RESPONSES

SILENCE = b": \n\n"
"""A comment of the event stream, which clients ignore."""


def responses_routes(service: Service) -> APIRouter:
    """Create the route of a service."""
    router = APIRouter()

    @router.post("/v1/responses", responses=OR_EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        target = service.serving(body.model)
        target.ignored.note(refuse_unsupported(body, RESPONSES))
        try:
            parsed = await parse_chat(body.chat(), target, request.state.key)
        except ApiError as error:
            raise rename_field(error, body) from None
        forget_body(request)
        slot = request.state.slot
        formatter = ResponseFormat(body, parsed, target.fingerprint, target.text)
        work = partial(reply_in_turn, parsed, target, slot)
        if body.stream:
            return EventStream(_events(parsed, target, slot, work, formatter))
        return JSONResponse(formatter.response(await target.runner.run(work(None), slot)))

    return router


async def _events(
    parsed: ParsedRequest,
    service: Service,
    slot: QueueSlot,
    work: Callable[[Tell], Coroutine[Any, Any, CompletedReply]],
    formatter: ResponseFormat,
) -> AsyncGenerator[bytes, None]:
    """The stream: items with text as it becomes certain, comments in between, the response."""
    settings, events = service.settings, ResponseEvents(formatter)
    stream, sent_tokens = ReplyStream(parsed.reply_in_reasoning, parsed.calls), 0
    for opening in events.opening():
        yield _encoded(opening)
    try:
        async for item in service.runner.follow(work, slot, settings.keepalive_seconds):
            match item:
                case Silence():
                    yield SILENCE
                case WorkDone(reply):
                    remaining = reply.logprobs[0][sent_tokens:] if reply.logprobs else None
                    last_events = events.more(stream.rest(reply.choices[0][0]), remaining)
                    for payload in (*last_events, *events.ending(reply)):
                        yield _encoded(payload)
                case Certain(_, text, tokens):
                    parts = stream.more(text)
                    new_tokens = tokens[sent_tokens:] if tokens and parts.text else []
                    sent_tokens += len(new_tokens)
                    for payload in events.more(parts, new_tokens):
                        yield _encoded(payload)
                case ReasoningPart(line):
                    for payload in events.more(Parts(line, "")):
                        yield _encoded(payload)
    except Exception as error:  # the HTTP boundary: send the error, then cut the stream
        reply_error = translate(error, settings.retry_after_seconds)
        yield _encoded(events.error(reply_error.body()["error"]))
        raise StreamAborted from error


def _encoded(data: dict[str, Any]) -> bytes:
    """Encode a server-sent event, named after its ``type``."""
    return event(data, data["type"])
