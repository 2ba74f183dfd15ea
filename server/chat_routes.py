"""``POST /v1/chat/completions`` and ``POST /v1/completions``: plain replies and searched ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from runtime.text import Text
from search.engine import Engine
from search.events import Event
from search.outcome import Outcome
from search.spec import SearchSpec
from server.admission import QueueSlot, seconds_after_turn
from server.api_errors import StreamAborted, translate
from server.booked_engine import BookedEngine
from server.middleware import forget_body
from server.replies import (
    CompletedReply,
    ReplyFormat,
    best_choices,
    finish_reason,
    reply_format,
    search_document,
)
from server.reply_events import Certain, ReasoningPart, Tell
from server.reply_logprobs import LogprobRecorder, ReplyToken, in_text
from server.reply_text import first_stop, held_back
from server.request_models import ChatRequest, TextRequest
from server.request_parsing import ParsedRequest, parse_chat, parse_completion
from server.search_runner import Silence, WorkDone
from server.service import Service
from server.side_by_side import draw_side_by_side
from server.streams import (
    DONE,
    OR_EVENTS,
    EventStream,
    Progress,
    ReplyStream,
    StablePrefix,
    event,
)
from server.written_reply import TIME_TO_WRITE, write


def chat_routes(service: Service) -> APIRouter:
    """Create the routes of a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=OR_EVENTS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        target = service.serving(body.model)
        parsed = await parse_chat(body, target, request.state.key)
        return await _answer(parsed, target, request, stream=body.stream)

    @router.post("/v1/completions", responses=OR_EVENTS)
    async def completions(body: TextRequest, request: Request) -> Response:
        target = service.serving(body.model)
        parsed = await parse_completion(body, target, request.state.key)
        return await _answer(parsed, target, request, stream=body.stream)

    return router


async def _answer(
    parsed: ParsedRequest, service: Service, request: Request, *, stream: bool | None
) -> Response:
    forget_body(request)
    slot = request.state.slot
    formatter = reply_format(parsed, service.fingerprint, service.text)
    work = partial(reply_in_turn, parsed, service, slot)
    if stream:
        return EventStream(_chunks(parsed, service, slot, work, formatter))
    return JSONResponse(formatter.completion(await service.runner.run(work(None), slot)))


async def reply_in_turn(
    parsed: ParsedRequest, service: Service, slot: QueueSlot, tell: Tell | None
) -> CompletedReply:
    """Draw or search the reply when it is the request's turn; ``tell`` is called with its parts as
    they become certain. A search under a schema leaves TIME_TO_WRITE of its time for the JSON."""
    if parsed.spec is None:
        return await _draw(parsed, service, slot, tell)
    deadline = time.monotonic() + parsed.seconds
    progress = Progress() if parsed.include_reasoning else None
    searching, recorder = parsed, None
    if parsed.json_request is not None:
        searching = replace(parsed, seconds=parsed.seconds * (1 - TIME_TO_WRITE))
    elif parsed.logprobs is not None:
        recorder = LogprobRecorder(service.runner.engine, parsed.logprobs)
    if progress is not None:
        listen = _rounds(progress, tell)
    else:
        teller = None if parsed.json_request is not None else tell
        listen = (lambda _: None) if teller is None else _certain(parsed, parsed.spec, teller)
    outcome = await search_in_turn(searching, service, slot, listen, recorder)
    if service.trees.enabled:
        await service.log_tree(search_document(parsed, outcome, service.fingerprint))
    logprobs, replies = (), None
    if recorder is not None:
        logprobs = searched_logprobs(parsed, outcome, recorder, service.text)
    if parsed.json_request is not None:
        seconds = max(0.0, deadline - time.monotonic())
        replies = await write(parsed, outcome, service, seconds=seconds, tell=tell)
    return CompletedReply(parsed, outcome, progress.text if progress else "", logprobs, replies)


async def _draw(
    parsed: ParsedRequest, service: Service, slot: QueueSlot, tell: Tell | None
) -> CompletedReply:
    """Draw plain replies when it is the request's turn. Raises ApiError if the key has used up its
    tokens by then."""
    seconds = await seconds_after_turn(slot, parsed.seconds)
    service.quotas.must_have_left(parsed.key)
    with service.quotas.booking(parsed.key, parsed.prompt_tokens, searched=False) as usage:
        draws = await draw_side_by_side(
            parsed.completions,
            parsed.tree,
            service,
            usage,
            seconds=seconds,
            logprobs=parsed.logprobs,
            tell=tell,
        )
        return CompletedReply(parsed, draws.replies, logprobs=draws.logprobs)


async def search_in_turn(
    parsed: ParsedRequest,
    service: Service,
    slot: QueueSlot | None,
    listen: Callable[[Event], None],
    engine: Engine | None = None,
) -> Outcome:
    """Search when it is the request's turn (at once without a slot) and book the tokens used.
    ``engine``: a wrapper of the service's engine to search with. Raises ApiError if the key has
    used up its tokens by then."""
    assert parsed.spec is not None, "a plain reply needs no search"
    seconds = await seconds_after_turn(slot, parsed.seconds)
    service.quotas.must_have_left(parsed.key)
    prompt = len(parsed.problem.prompt)
    with service.quotas.booking(parsed.key, prompt, searched=True) as usage:

        def on_event(event: Event) -> None:
            usage.on_event(event)
            listen(event)

        return await service.runner.search(
            parsed.tree,
            parsed.problem,
            parsed.spec,
            seconds=seconds,
            listen=on_event,
            continuation=parsed.continuation,
            in_reasoning=bool(parsed.in_reasoning),
            engine=BookedEngine(engine or service.runner.engine, usage),
        )


def searched_logprobs(
    parsed: ParsedRequest, outcome: Outcome, recorder: LogprobRecorder, text: Text
) -> list[list[ReplyToken]]:
    """The log-probabilities of the tokens of each reply that a search has chosen."""
    choices = []
    for node, (words, _) in best_choices(parsed, outcome):
        tokens = recorder.along([step.id for step in outcome.tree.chain(node)])
        choices.append(in_text(tokens, len(words), text))
    return choices


def _rounds(progress: Progress, tell: Tell | None) -> Callable[[Event], None]:
    """A listener that tells of each round when it is over. No text of the reply is told before the
    end: clients would show reasoning that comes after text as a thought inside it."""

    def on_event(event: Event) -> None:
        line = progress.on_event(event)
        if tell is not None and line is not None:
            tell(ReasoningPart(line))

    return on_event


def _certain(parsed: ParsedRequest, spec: SearchSpec, tell: Tell) -> Callable[[Event], None]:
    """A listener that tells what of the reply is certain, after all events of a round have come."""
    stable_prefix, offset = StablePrefix(spec), 0
    loop, looking = asyncio.get_running_loop(), False

    def look() -> None:
        nonlocal offset, looking
        looking = False
        text = stable_prefix.text()
        end = first_stop(text, parsed.stop, offset)
        if end is None:
            end = len(text) - held_back(text, parsed.stop)
        tell(Certain(0, text[offset:end]))
        offset = max(offset, end)

    def on_event(event: Event) -> None:
        nonlocal looking
        stable_prefix.on_event(event)
        if not looking:
            looking = True
            loop.call_soon(look)

    return on_event


async def _chunks(
    parsed: ParsedRequest,
    service: Service,
    slot: QueueSlot,
    work: Callable[[Tell], Coroutine[Any, Any, CompletedReply]],
    formatter: ReplyFormat,
) -> AsyncGenerator[bytes, None]:
    """The stream: roles, rounds or text as it becomes certain (empty deltas in between), finish
    reasons, usage and ``[DONE]``."""
    settings = service.settings
    streams = [ReplyStream(parsed.reply_in_reasoning, parsed.calls) for _ in range(parsed.choices)]
    sent_tokens = [0] * parsed.choices
    for index in range(1 if parsed.spec else parsed.choices):
        for opening in formatter.opening(index):
            yield event(opening)
    try:
        async for item in service.runner.follow(work, slot, settings.keepalive_seconds):
            match item:
                case Silence():
                    yield event(formatter.piece())
                case WorkDone(reply):
                    for data in _ending(parsed, reply, streams, sent_tokens, formatter):
                        yield event(data)
                    yield DONE
                case Certain(index, text, tokens):
                    new_tokens = None if tokens is None else tokens[sent_tokens[index] :]
                    pieces = formatter.pieces(index, streams[index].more(text), new_tokens)
                    for piece in pieces:
                        yield event(piece)
                    sent_tokens[index] += len(new_tokens or ()) if pieces else 0
                case ReasoningPart(line):
                    for chunk in formatter.reasoning(0, line):
                        yield event(chunk)
    except Exception as error:  # the HTTP boundary: send the error, then cut the stream
        reply_error = translate(error, settings.retry_after_seconds)
        yield event(reply_error.body())
        raise StreamAborted from error


def _ending(
    parsed: ParsedRequest,
    reply: CompletedReply,
    streams: Sequence[ReplyStream],
    sent_tokens: Sequence[int],
    formatter: ReplyFormat,
) -> list[dict[str, Any]]:
    """The last chunks: the rest of each text and of its log-probabilities, of which ``sent_tokens``
    are sent already, and its finish reason; the last one also has the seed and the search."""
    chunks = []
    for index, (text, finish) in enumerate(reply.choices):
        if index and reply.search is not None:
            chunks += formatter.opening(index)
            if reply.reasoning:
                chunks += formatter.reasoning(index, reply.reasoning[index])
        remaining = reply.logprobs[index][sent_tokens[index] :] if reply.logprobs else None
        pieces = formatter.pieces(index, streams[index].rest(text), remaining)
        chunks += pieces
        reason = finish_reason(finish, called=streams[index].called)
        chunks.append(formatter.piece(index, None, reason, None if pieces else remaining))
    chunks[-1] |= {"seed": parsed.seed}
    if reply.search is not None:
        chunks[-1] |= {"search": reply.search}
    return [*chunks, formatter.usage(reply.usage)] if parsed.include_usage else chunks
