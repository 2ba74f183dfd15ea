"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.outcome import Outcome
from server.ask import Ask, ask_chat
from server.completion import PlainReply
from server.disconnect import run_for
from server.errors import StreamAborted, translate
from server.reply import Reply, chunk, search_document, usage_chunk
from server.service import Service
from server.stream import DONE, Result, Silence, event, follow, streaming
from server.wire import ChatRequest


def chat_routes(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        ask = await ask_chat(body, service)
        if body.stream:
            return streaming(_chunks(ask, service))
        work = _work(ask, service, lambda _: None)
        done = await run_for(request, service.forest, work)
        return JSONResponse(Reply(ask, done).completion(ask, service.fingerprint))

    return router


async def _work(ask: Ask, service: Service, tell: Callable[[str], None]) -> PlainReply | Outcome:
    """What was asked for; ``tell`` gets a plain reply's text as it becomes certain."""
    if ask.spec is None:
        return await service.forest.complete(ask.id, ask.completion, tell)
    seconds = service.settings.deadline_seconds
    outcome = await service.forest.search(ask.id, ask.problem, ask.spec, seconds=seconds)
    if service.trees.wanted:
        service.trees.write(search_document(ask, outcome, service.fingerprint))
    return outcome


async def _chunks(ask: Ask, service: Service) -> AsyncIterator[bytes]:
    """The stream: role, text when it is certain (empty deltas meanwhile), reason, usage, end."""
    mark, settings = service.fingerprint, service.settings
    yield event(chunk(ask, mark, {"role": "assistant", "content": ""}))
    try:
        work = partial(_work, ask, service)
        async for item in follow(service.forest, work, settings.keepalive_seconds):
            match item:
                case Silence():
                    yield event(chunk(ask, mark, {}))
                case Result(done):
                    for data in _ending(ask, service, Reply(ask, done)):
                        yield data
                case str() if item:
                    yield event(chunk(ask, mark, {"content": item}))
    except Exception as error:  # the HTTP boundary: told to the client, then cut
        said = translate(error, settings.retry_after_seconds)
        yield event(said.body())
        raise StreamAborted from error


def _ending(ask: Ask, service: Service, reply: Reply) -> list[bytes]:
    mark = service.fingerprint
    last = chunk(ask, mark, {}, reply.finish_reason)
    events = []
    if reply.search is not None:
        events.append(event(chunk(ask, mark, {"content": reply.text})))
        last |= {"search": reply.search}
    events.append(event(last | {"seed": ask.seed}))
    if ask.include_usage:
        events.append(event(usage_chunk(ask, mark, reply.usage)))
    return [*events, DONE]
