"""Draws several plain replies concurrently: one engine call draws a piece of every reply to the
same prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from runtime.all_of import all_of
from runtime.engine_wrapper import EngineWrapper
from search.counters import Counters
from search.engine import Branch, Engine, Sampling, Step
from search.tree import ROOT
from server.booked_engine import BookedEngine
from server.plain_completion import PlainCompletion, PlainReply
from server.quotas import ReplyTokens
from server.reply_events import Certain, Tell
from server.reply_logprobs import LogprobRecorder, ReplyToken, in_text
from server.service import Service

Completions = Sequence[Sequence[PlainCompletion]]
"""The replies to draw, grouped by prompt."""


class DrawnReplies(NamedTuple):
    """The replies, and the log-probabilities of their tokens if these were asked for."""

    replies: list[PlainReply]
    logprobs: list[list[ReplyToken]]


async def draw_side_by_side(
    completions: Completions,
    tree: str,
    service: Service,
    usage: ReplyTokens,
    *,
    seconds: float,
    logprobs: int | None,
    tell: Tell | None,
) -> DrawnReplies:
    """Draw all replies within ``seconds``. ``tree``: their names' prefix; ``logprobs``: how many
    likeliest tokens to record, or None. Until they are done ``usage`` counts whole pieces."""
    runner, engine = service.runner, BookedEngine(service.runner.engine, usage)
    places = list(_places(completions, tree, engine))
    recorders: list[LogprobRecorder] = []
    if logprobs is not None:
        recorders = [LogprobRecorder(engine, logprobs) for *_, engine in places]
    before = usage.completion

    def draw(index: int, place: Place) -> Coroutine[None, None, PlainReply]:
        completion, name, engine = place
        recorder = recorders[index] if recorders else None
        length = 0

        def on_text(text: str) -> None:
            nonlocal length
            usage.completion += completion.piece
            length += len(text)
            if tell is not None:
                reply_tokens = recorder and in_text(recorder.all_tokens(), length, service.text)
                tell(Certain(index, text, reply_tokens))

        request = replace(completion, seconds=seconds)
        return runner.complete(name, request, on_text, recorder or engine)

    replies = await all_of(draw(index, place) for index, place in enumerate(places))
    usage.completion = before + sum(reply.tokens for reply in replies)
    pairs = zip(recorders, replies, strict=True) if recorders else ()
    tokens = [in_text(r.all_tokens(), len(reply.text), service.text) for r, reply in pairs]
    return DrawnReplies(replies, tokens)


Place = tuple[PlainCompletion, str, Engine]


def _places(completions: Completions, tree: str, engine: Engine) -> Iterator[Place]:
    """Each reply with its tree's name and engine; replies to one prompt share a JointReplies."""
    alone = len(completions) == 1
    for number, draws in enumerate(completions):
        tree_name = tree if alone else f"{tree}.{number}"
        if len(draws) == 1:
            yield draws[0], tree_name, engine
            continue
        names = [f"{tree_name}.{request.draw}" for request in draws]
        joint = JointReplies(engine, tree_name, names)
        yield from ((request, name, joint) for request, name in zip(draws, names, strict=True))


PendingDraw = tuple[Branch, "asyncio.Future[Step]"]


class JointReplies(EngineWrapper):
    """An engine for replies that are drawn together, each of which uses one tree of ``trees``.

    To the wrapped engine they are branches of one ``tree``: when every unfinished reply has asked
    for its next piece, all are drawn in one call. Each has its own seed, as when drawn alone.
    """

    def __init__(self, engine: Engine, tree: str, trees: Sequence[str]) -> None:
        super().__init__(engine)
        self._tree = tree
        self._places = {name: place for place, name in enumerate(trees)}
        self._going = set(trees)
        self._pending: dict[str, PendingDraw] = {}
        self._sampling = Sampling()
        self._drawing: asyncio.Task[list[Step]] | None = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw the next piece of one reply, when all others have asked for theirs."""
        (branch,) = branches
        step: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._pending[tree] = self._apart(branch, self._places[tree]), step
        self._sampling = sampling
        self._draw_when_all_ask()
        return [await step]

    async def release(self, tree: str) -> Counters:
        """End one reply; the last one releases the tree and returns the counters of all."""
        return await super().release(self._tree) if self._leave(tree) else Counters()

    async def abort(self, tree: str) -> Counters:
        """Give up one reply; the last one aborts the tree and returns the counters of all."""
        return await super().abort(self._tree) if self._leave(tree) else Counters()

    def _leave(self, tree: str) -> bool:
        """Remove a reply; return whether none remains."""
        self._going.discard(tree)
        self._pending.pop(tree, None)
        self._draw_when_all_ask()
        if not self._going and self._drawing is not None:
            self._drawing.cancel()
        return not self._going

    def _apart(self, branch: Branch, place: int) -> Branch:
        """The branch with node ids that no other reply uses."""

        def node_id(node: int) -> int:
            return node if node == ROOT else (node - 1) * len(self._places) + place + 1

        child = place if branch.parent == ROOT else branch.child
        return replace(
            branch, parent=node_id(branch.parent), child=child, node=node_id(branch.node)
        )

    def _draw_when_all_ask(self) -> None:
        if not self._pending or len(self._pending) < len(self._going):
            return
        pending, self._pending = list(self._pending.values()), {}
        branches = [branch for branch, _ in pending]
        drawing = super().expand(self._tree, branches, self._sampling)
        self._drawing = asyncio.ensure_future(drawing)
        self._drawing.add_done_callback(partial(_deliver, pending))


def _deliver(pending: Sequence[PendingDraw], drawing: asyncio.Task[list[Step]]) -> None:
    """Give each reply that still waits its step, or the error of the call."""
    for place, (_, step) in enumerate(pending):
        if step.done():
            continue
        if drawing.cancelled():
            step.cancel()
        elif (error := drawing.exception()) is not None:
            step.set_exception(error)
        else:
            step.set_result(drawing.result()[place])
