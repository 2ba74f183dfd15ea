"""Plain completions: one chain drawn in pieces, so that a stream can show certain text early."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from search.controller import ABORT_SECONDS, within
from search.engine import (
    NEUTRAL,
    Branch,
    Engine,
    EngineError,
    LogitsParams,
    PrefixTooLong,
    Sampling,
)
from search.stop import Deadline, TooLate
from search.tree import Finish, node_seed
from server.api_errors import NO_RETRY, ApiError
from server.reply_text import first_stop, held_back


@dataclass(frozen=True, slots=True)
class PlainCompletion:
    """A request for one plain reply to ``prompt``: ``limit`` tokens at most, ``piece`` at a time.

    ``stop`` strings end the reply and are not part of it; ``seconds`` is the time for all of it.
    ``draw`` numbers the replies to one request. With ``ignore_eos`` the model cannot end the reply.
    ``logits``: other sampling parameters; before its ``min_tokens`` stop strings do not count.
    ``grammar``: the JSON schema that the reply must fit.
    """

    prompt: tuple[int, ...]
    limit: int
    piece: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seconds: float = 600.0
    draw: int = 0
    ignore_eos: bool = False
    logits: LogitsParams = NEUTRAL
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class PlainReply:
    """The reply's text, how many tokens were drawn for it, and why it ended."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]


async def complete(
    request: PlainCompletion, engine: Engine, tree_id: str, on_text: Callable[[str], None]
) -> PlainReply:
    """Draw the reply, calling ``on_text`` with each part of it that can no longer change.

    Noise depends on the seed and the absolute position, so the size of pieces changes nothing. At
    the deadline the reply is what was drawn so far. Raises EngineError, and ApiError (504) if
    nothing was. In every case the engine releases the tree, if need be after the reply.
    """
    deadline = Deadline(time.monotonic, time.monotonic() + request.seconds)
    limit = min(request.limit, engine.capabilities.context_tokens - len(request.prompt))
    if limit < 1:
        raise PrefixTooLong(f"{len(request.prompt)} prompt tokens leave no room for a reply")
    try:
        reply = await _chain(request, limit, deadline, engine, tree_id, on_text)
        with suppress(EngineError, TooLate):  # the reply is complete without it
            await within(deadline.releasing(), engine.release(tree_id))
        return reply
    except BaseException:
        with suppress(EngineError, TooLate):
            await within(deadline.closing(ABORT_SECONDS), engine.abort(tree_id))
        raise


async def _chain(
    request: PlainCompletion,
    limit: int,
    deadline: Deadline,
    engine: Engine,
    tree_id: str,
    on_text: Callable[[str], None],
) -> PlainReply:
    seed = node_seed(request.seed, "step", (request.draw,))
    start = len(request.prompt)
    least = 0 if request.grammar is not None else request.logits.min_tokens  # JSON has no minimum
    temperature, top_p, logits = request.temperature, request.top_p, request.logits
    sampling = Sampling(
        temperature, top_p, request.stop, request.piece, logits, start, grammar=request.grammar
    )
    tokens, text, sent_end, node = request.prompt, "", 0, 0
    count = unstoppable_end = 0
    while True:
        most = least - count if count < least else limit - count
        branch = Branch(node, 0, tokens, seed, min(request.piece, most, limit - count), node + 1)
        try:
            (step,) = await within(deadline.remaining(), engine.expand(tree_id, [branch], sampling))
        except TooLate:
            if not node:
                message = "the deadline came before any of the reply was drawn"
                raise ApiError(504, "deadline_exceeded", message, headers=NO_RETRY) from None
            on_text(text[sent_end:])
            return PlainReply(text, count, "length")
        tokens, text, node = tokens + step.tokens, text + step.text, node + 1
        count = len(tokens) - start
        if count <= least:
            unstoppable_end = len(text)
        end = first_stop(text, request.stop, max(sent_end, unstoppable_end))
        if end is not None or (step.finish is Finish.END and not request.ignore_eos):
            on_text(text[sent_end:end])
            return PlainReply(text[:end], count, "stop")
        if count >= limit:
            on_text(text[sent_end:])
            return PlainReply(text, count, "length")
        stable_end = len(text) - held_back(text, request.stop)
        on_text(text[sent_end:stable_end])
        sent_end = stable_end
