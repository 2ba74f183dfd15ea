"""Plain replies that are drawn side by side: a call of the engine draws a piece of each to one
prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from search.engine import Engine
from server.joint_replies import JointReplies
from server.limits import ReplyTokens
from server.plain_completion import PlainCompletion, PlainReply
from server.reply_events import Certain, Tell
from server.reply_logprobs import LogprobRecorder, ReplyToken, in_text
from server.service import Service

T = TypeVar("T")

Completions = Sequence[Sequence[PlainCompletion]]
"""Replies, those to one prompt together."""


class DrawnReplies(NamedTuple):
    """What was drawn, and the log-probabilities of the replies' tokens where these are wanted."""

    replies: list[PlainReply]
    logprobs: list[list[ReplyToken]]


async def draw_side_by_side(
    completions: Completions,
    tree: str,
    service: Service,
    spent: ReplyTokens,
    *,
    seconds: float,
    logprobs: int | None,
    tell: Tell | None,
) -> DrawnReplies:
    """Draw them within ``seconds``. ``tree``: names them; ``logprobs``: of so many likeliest tokens
    too, None: of none. Until they are done they cost whole pieces."""
    runner, places = service.runner, list(_places(completions, tree, service.runner.engine))
    recorders: list[LogprobRecorder] = []
    if logprobs is not None:
        recorders = [LogprobRecorder(engine, logprobs) for *_, engine in places]
    before = spent.completion

    def draw(index: int, place: Place) -> Coroutine[None, None, PlainReply]:
        wanted, name, engine = place
        recorder = recorders[index] if recorders else None
        length = 0

        def on_text(text: str) -> None:
            nonlocal length
            spent.completion += wanted.piece
            length += len(text)
            if tell is not None:
                known = recorder and in_text(recorder.drawn(), length, service.text)
                tell(Certain(index, text, known))

        own = replace(wanted, seconds=seconds)
        return runner.complete(name, own, on_text, recorder or engine)

    replies = await _all([draw(index, place) for index, place in enumerate(places)])
    spent.completion = before + sum(reply.tokens for reply in replies)
    pairs = zip(recorders, replies, strict=True) if recorders else ()
    tokens = [in_text(own.drawn(), len(reply.text), service.text) for own, reply in pairs]
    return DrawnReplies(replies, tokens)


Place = tuple[PlainCompletion, str, Engine]


def _places(completions: Completions, tree: str, engine: Engine) -> Iterator[Place]:
    """Each reply with its tree's name and what draws it: those to one prompt are drawn together."""
    alone = len(completions) == 1
    for number, draws in enumerate(completions):
        own = tree if alone else f"{tree}.{number}"
        if len(draws) == 1:
            yield draws[0], own, engine
            continue
        names = [f"{own}.{wanted.draw}" for wanted in draws]
        joint = JointReplies(engine, own, names)
        yield from ((wanted, name, joint) for wanted, name in zip(draws, names, strict=True))


async def _all(works: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """What all come to. None goes on when one has failed, and all have ended then."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # or it lets go of its tree already
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
