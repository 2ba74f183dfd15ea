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
from server.admission import Ticket, seconds_after_turn
from server.ask import Ask, ask_chat, ask_text
from server.completion import Completion, PlainReply, first_stop, held_back
from server.disconnect import forget_body, run_for
from server.errors import StreamAborted, translate
from server.foresight import Foresight
from server.ledger import Spent
from server.progress import Progress
from server.reply import Reply, chunk, search_document, usage_chunk
from server.service import Service
from server.shapes import Shape
from server.stream import DONE, Events, Result, Silence, event, follow
from server.thoughts import Saying
from server.wire import ChatRequest, TextRequest


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
            await ask_chat(body, service.serving(body.model), request.state.key),
            body.stream,
            request,
        )

    @router.post("/v1/completions")
    async def completions(body: TextRequest, request: Request) -> Response:
        return await answer(
            await ask_text(body, service.serving(body.model), request.state.key),
            body.stream,
            request,
        )

    async def answer(ask: Ask, stream: bool | None, request: Request) -> Response:
        forget_body(request)
        own = service.serving(ask.model)
        ticket = request.state.ticket
        work = partial(_work, ask, own, ticket)
        if stream:
            return Events(_chunks(ask, own, ticket, work))
        reply = await run_for(ticket, own.forest, work(None))
        return JSONResponse(reply.completion(ask, own.fingerprint))

    return router


async def _work(ask: Ask, service: Service, ticket: Ticket, tell: Tell | None) -> Reply:
    """What was asked for, when it is its turn; ``tell`` hears of it as it grows."""
    seconds = await seconds_after_turn(ticket, ask.seconds)
    searched = ask.spec is not None
    with service.ledger.booking(ask.key, len(ask.problem.prompt), searched=searched) as spent:
        if searched:
            reply = Reply(ask, await _search(ask, service, seconds, spent, tell))
        else:
            reply = Reply(ask, await _draw(ask, service, seconds, spent, tell))
            spent.completion = reply.usage["completion_tokens"]
    return reply


async def _draw(
    ask: Ask, service: Service, seconds: float, spent: Spent, tell: Tell | None
) -> Sequence[PlainReply]:
    """Plain replies, side by side. Until they are done they cost whole pieces."""

    def draw(wanted: Completion) -> asyncio.Task[PlainReply]:
        tree = f"{ask.tree}.{wanted.draw}" if wanted.draw else ask.tree
        timed = replace(wanted, seconds=seconds)

        def hear(text: str) -> None:
            spent.completion += wanted.piece
            if tell is not None:
                tell(Certain(wanted.draw, text))

        return asyncio.create_task(service.forest.complete(tree, timed, hear))

    tasks = [draw(wanted) for wanted in ask.completions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _search(
    ask: Ask, service: Service, seconds: float, spent: Spent, tell: Tell | None
) -> Outcome:
    assert ask.spec is not None, "a plain reply needs no search"
    certain = None if tell is None else _certain(ask, ask.spec, tell)

    def hear(event: Event) -> None:
        spent.hear(event)
        if certain is not None:
            certain(event)

    outcome = await service.forest.search(
        ask.tree,
        ask.problem,
        ask.spec,
        seconds=seconds,
        listen=hear,
        in_thought=bool(ask.in_thought),
    )
    if service.trees.wanted:
        await service.log_tree(search_document(ask, outcome, service.fingerprint))
    return outcome


def _certain(ask: Ask, spec: SearchSpec, tell: Tell) -> Callable[[Event], None]:
    """Tells a search's events, and what of its reply is certain once all of a round are heard."""
    foresight, sent = Foresight(spec), 0
    loop, looking = asyncio.get_running_loop(), False

    def look() -> None:
        nonlocal sent, looking
        looking = False
        text = foresight.text()
        end = first_stop(text, ask.stop, sent)
        if end is None:
            end = len(text) - held_back(text, ask.stop)
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
    ask: Ask,
    service: Service,
    ticket: Ticket,
    work: Callable[[Tell], Coroutine[Any, Any, Reply]],
) -> AsyncGenerator[bytes, None]:
    """The stream: roles, text when it is certain (empty deltas meanwhile), reasons, usage, end."""
    settings, shape = service.settings, ask.shape
    write = partial(chunk, ask, service.fingerprint)
    progress = Progress() if ask.include_reasoning else None
    sayings = [Saying(ask.in_thought) for _ in range(ask.choices)]
    for opening in filter(None, map(shape.opening, range(1 if ask.spec else ask.choices))):
        yield event(write(opening))
    try:
        async for item in follow(ticket, service.forest, work, settings.keepalive_seconds):
            match item:
                case Silence():
                    yield event(write(shape.piece(0)))
                case Result(reply):
                    for data in _ending(ask, service, reply, sayings):
                        yield data
                case Certain(index, text):
                    for piece in _pieces(shape, index, *sayings[index].more(text)):
                        yield event(write(piece))
                case Event() if progress is not None and (line := progress.hear(item)):
                    told = shape.reasoning(line)
                    if told is not None:
                        yield event(write(told))
    except Exception as error:  # the HTTP boundary: told to the client, then cut
        said = translate(error, settings.retry_after_seconds)
        yield event(said.body())
        raise StreamAborted from error


def _ending(ask: Ask, service: Service, reply: Reply, sayings: Sequence[Saying]) -> list[bytes]:
    """What is left of each text, why it ended, the seed and the search with the last one."""
    mark, shape = service.fingerprint, ask.shape
    events = []
    for index, (text, finish_reason) in enumerate(reply.choices):
        if reply.search is not None and index and (opening := shape.opening(index)) is not None:
            events.append(event(chunk(ask, mark, opening)))
        for piece in _pieces(shape, index, *sayings[index].rest(text)):
            events.append(event(chunk(ask, mark, piece)))
        last = chunk(ask, mark, shape.piece(index, None, finish_reason))
        if index == len(reply.choices) - 1:
            last |= {"seed": ask.seed}
            last |= {} if reply.search is None else {"search": reply.search}
        events.append(event(last))
    if ask.include_usage:
        events.append(event(usage_chunk(ask, mark, reply.usage)))
    return [*events, DONE]


def _pieces(shape: Shape, index: int, thought: str, text: str) -> list[dict[str, Any]]:
    """The chunks' choices for parts of a thought and of a reply, either of which may be empty."""
    told = shape.reasoning(thought, index) if thought else None
    return [*([] if told is None else [told]), *([shape.piece(index, text)] if text else [])]
