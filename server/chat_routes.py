"""``POST /v1/chat/completions`` and ``POST /v1/completions``: plain replies and searched ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.events import Event
from search.outcome import Outcome
from search.spec import SearchSpec
from server.admission import QueueSlot, seconds_after_turn
from server.api_errors import StreamAborted, translate
from server.client_disconnect import forget_body
from server.plain_completion import PlainCompletion, PlainReply, first_stop, held_back
from server.quotas import ReplyTokens
from server.replies import CompletedReply, chunk, search_document, usage_chunk
from server.reply_formats import ReplyFormat
from server.request_models import ChatRequest, TextRequest
from server.request_parsing import ParsedRequest, parse_chat, parse_completion
from server.service import Service
from server.streams import (
    DONE,
    EventStream,
    Progress,
    ReasoningStream,
    Silence,
    StablePrefix,
    WorkDone,
    event,
    follow,
)


@dataclass(frozen=True, slots=True)
class Certain:
    """A part of a choice's text that can no longer change."""

    index: int
    text: str


Tell = Callable[[Certain | Event], None]


def chat_routes(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(
            await parse_chat(body, service.serving(body.model), request.state.key),
            body.stream,
            request,
        )

    @router.post("/v1/completions")
    async def completions(body: TextRequest, request: Request) -> Response:
        return await answer(
            await parse_completion(body, service.serving(body.model), request.state.key),
            body.stream,
            request,
        )

    async def answer(parsed: ParsedRequest, stream: bool | None, request: Request) -> Response:
        forget_body(request)
        own = service.serving(parsed.model)
        slot = request.state.slot
        work = partial(_work, parsed, own, slot)
        if stream:
            return EventStream(_chunks(parsed, own, slot, work))
        reply = await own.runner.run(work(None), slot)
        return JSONResponse(reply.completion(parsed, own.fingerprint))

    return router


async def _work(
    parsed: ParsedRequest, service: Service, slot: QueueSlot, tell: Tell | None
) -> CompletedReply:
    """What was asked for, when it is its turn; ``tell`` hears of it as it grows."""
    seconds = await seconds_after_turn(slot, parsed.seconds)
    searched = parsed.spec is not None
    with service.quotas.booking(parsed.key, len(parsed.problem.prompt), searched=searched) as spent:
        if searched:
            reply = CompletedReply(parsed, await _search(parsed, service, seconds, spent, tell))
        else:
            reply = CompletedReply(parsed, await _draw(parsed, service, seconds, spent, tell))
            spent.completion = reply.usage["completion_tokens"]
    return reply


async def _draw(
    parsed: ParsedRequest, service: Service, seconds: float, spent: ReplyTokens, tell: Tell | None
) -> Sequence[PlainReply]:
    """Plain replies, side by side. Until they are done they cost whole pieces."""

    def draw(wanted: PlainCompletion) -> asyncio.Task[PlainReply]:
        tree = f"{parsed.tree}.{wanted.draw}" if wanted.draw else parsed.tree
        timed = replace(wanted, seconds=seconds)

        def hear(text: str) -> None:
            spent.completion += wanted.piece
            if tell is not None:
                tell(Certain(wanted.draw, text))

        return asyncio.create_task(service.runner.complete(tree, timed, hear))

    tasks = [draw(wanted) for wanted in parsed.completions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _search(
    parsed: ParsedRequest, service: Service, seconds: float, spent: ReplyTokens, tell: Tell | None
) -> Outcome:
    assert parsed.spec is not None, "a plain reply needs no search"
    certain = None if tell is None else _certain(parsed, parsed.spec, tell)

    def hear(event: Event) -> None:
        spent.hear(event)
        if certain is not None:
            certain(event)

    outcome = await service.runner.search(
        parsed.tree,
        parsed.problem,
        parsed.spec,
        seconds=seconds,
        listen=hear,
        in_reasoning=bool(parsed.in_reasoning),
    )
    if service.trees.wanted:
        await service.log_tree(search_document(parsed, outcome, service.fingerprint))
    return outcome


def _certain(parsed: ParsedRequest, spec: SearchSpec, tell: Tell) -> Callable[[Event], None]:
    """Tells a search's events, and what of its reply is certain once all of a round are heard."""
    foresight, sent = StablePrefix(spec), 0
    loop, looking = asyncio.get_running_loop(), False

    def look() -> None:
        nonlocal sent, looking
        looking = False
        text = foresight.text()
        end = first_stop(text, parsed.stop, sent)
        if end is None:
            end = len(text) - held_back(text, parsed.stop)
        tell(Certain(0, text[sent:end]))
        sent = max(sent, end)

    def hear(event: Event) -> None:
        nonlocal looking
        tell(event)
        foresight.hear(event)
        if not looking:
            looking = True
            loop.call_soon(look)

    return hear


async def _chunks(
    parsed: ParsedRequest,
    service: Service,
    slot: QueueSlot,
    work: Callable[[Tell], Coroutine[Any, Any, CompletedReply]],
) -> AsyncGenerator[bytes, None]:
    """The stream: roles, text when it is certain (empty deltas meanwhile), reasons, usage, end."""
    settings, reply_format = service.settings, parsed.reply_format
    write = partial(chunk, parsed, service.fingerprint)
    progress = Progress() if parsed.include_reasoning else None
    reasoning = [ReasoningStream(parsed.in_reasoning) for _ in range(parsed.choices)]
    for opening in filter(
        None, map(reply_format.opening, range(1 if parsed.spec else parsed.choices))
    ):
        yield event(write(opening))
    try:
        async for item in follow(slot, service.runner, work, settings.keepalive_seconds):
            match item:
                case Silence():
                    yield event(write(reply_format.piece(0)))
                case WorkDone(reply):
                    for data in _ending(parsed, service, reply, reasoning):
                        yield data
                case Certain(index, text):
                    for piece in _pieces(reply_format, index, *reasoning[index].more(text)):
                        yield event(write(piece))
                case Event() if progress is not None and (line := progress.hear(item)):
                    told = reply_format.reasoning(line)
                    if told is not None:
                        yield event(write(told))
    except Exception as error:  # the HTTP boundary: told to the client, then cut
        said = translate(error, settings.retry_after_seconds)
        yield event(said.body())
        raise StreamAborted from error


def _ending(
    parsed: ParsedRequest,
    service: Service,
    reply: CompletedReply,
    reasoning: Sequence[ReasoningStream],
) -> list[bytes]:
    """What is left of each text, why it ended, the seed and the search with the last one."""
    mark, reply_format = service.fingerprint, parsed.reply_format
    events = []
    for index, (text, finish_reason) in enumerate(reply.choices):
        if (
            reply.search is not None
            and index
            and (opening := reply_format.opening(index)) is not None
        ):
            events.append(event(chunk(parsed, mark, opening)))
        for piece in _pieces(reply_format, index, *reasoning[index].rest(text)):
            events.append(event(chunk(parsed, mark, piece)))
        last = chunk(parsed, mark, reply_format.piece(index, None, finish_reason))
        if index == len(reply.choices) - 1:
            last |= {"seed": parsed.seed}
            last |= {} if reply.search is None else {"search": reply.search}
        events.append(event(last))
    if parsed.include_usage:
        events.append(event(usage_chunk(parsed, mark, reply.usage)))
    return [*events, DONE]


def _pieces(reply_format: ReplyFormat, index: int, thought: str, text: str) -> list[dict[str, Any]]:
    """The chunks' choices for parts of a thought and of a reply, either of which may be empty."""
    told = reply_format.reasoning(thought, index) if thought else None
    return [*([] if told is None else [told]), *([reply_format.piece(index, text)] if text else [])]
