"""Log-probabilities of a reply's tokens, in OpenAI's two formats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from runtime.engine_wrapper import EngineWrapper
from runtime.text import Text
from search.engine import Branch, Capabilities, Engine, Sampling, Step, TokenLogprob
from server.api_errors import bad_value, unsupported
from server.request_models import ChatRequest, TextRequest


def chat_top_logprobs(request: ChatRequest, able: Capabilities) -> int | None:
    """How many likeliest tokens a chat asks for at each position; None: none. Raises ApiError."""
    if not request.logprobs:
        if request.top_logprobs:
            raise bad_value("top_logprobs", "logprobs must be true with it")
        return None
    return _checked_top("logprobs", request.top_logprobs or 0, able)


def text_top_logprobs(request: TextRequest, able: Capabilities) -> int | None:
    """How many likeliest tokens a text completion asks for; None: none. Raises ApiError."""
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "leave it out with logprobs: a prompt's are not told")
    return None if request.logprobs is None else _checked_top("logprobs", request.logprobs, able)


def _checked_top(name: str, top: int, able: Capabilities) -> int:
    if not able.logprobs:
        raise unsupported(name, f"the {able.engine} engine does not tell them; leave it out")
    return top


class LogprobRecorder(EngineWrapper):
    """An engine wrapper that keeps the tokens and log-probabilities drawn for one reply or search,
    by the node that a step becomes."""

    def __init__(self, engine: Engine, top: int) -> None:
        """``top``: the number of likeliest tokens to keep at each position."""
        super().__init__(engine)
        self._top = top
        self._steps: dict[int, Step] = {}

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw steps, asking the engine for log-probabilities too, and keep them."""
        steps = await self._engine.expand(tree, branches, replace(sampling, logprobs=self._top))
        nodes = (branch.node for branch in branches)
        self._steps |= dict(zip(nodes, steps, strict=True))
        return steps

    def along(self, nodes: Sequence[int]) -> list[tuple[int, TokenLogprob]]:
        """The tokens of the steps that became these nodes, each with its log-probabilities."""
        steps = [self._steps[node] for node in nodes]
        return [pair for step in steps for pair in zip(step.tokens, step.logprobs, strict=True)]

    def all_tokens(self) -> list[tuple[int, TokenLogprob]]:
        """The tokens of all steps, which must be one chain, with their log-probabilities."""
        return self.along(sorted(self._steps))


class ReplyToken(NamedTuple):
    """A token of a reply's text: its offset in the text, in characters, and its
    log-probabilities."""

    id: int
    offset: int
    odds: TokenLogprob


def in_text(pairs: Sequence[tuple[int, TokenLogprob]], end: int, text: Text) -> list[ReplyToken]:
    """The tokens that make up the first ``end`` characters of a reply; tokens without text are left
    out. A character of several tokens begins with the first of them."""
    decoder, length = codecs.getincrementaldecoder("utf-8")("replace"), 0
    tokens = []
    for token, odds in pairs:
        if spelled := text.piece(token):
            tokens.append(ReplyToken(token, length, odds))
            length += len(decoder.decode(spelled))
    return [*takewhile(lambda token: token.offset < end, tokens)]


def chat_logprobs(tokens: Sequence[ReplyToken], text: Text) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice."""
    content = []
    for token in tokens:
        top = [_entry(candidate, logprob, text) for candidate, logprob in token.odds.top]
        content.append(_entry(token.id, token.odds.logprob, text) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[ReplyToken], text: Text, start: int = 0) -> dict[str, Any]:
    """The ``logprobs`` object of a text completion's choice; ``start``: offset of the reply.
    ``top_logprobs`` includes the token that was drawn, as vLLM's does."""
    pairs = [(token.id, token.odds.logprob) for token in tokens]
    top = [
        {_word(candidate, text): value for candidate, value in (*token.odds.top, pair)}
        for token, pair in zip(tokens, pairs, strict=True)
    ]
    return {
        "tokens": [_word(token.id, text) for token in tokens],
        "token_logprobs": [token.odds.logprob for token in tokens],
        "top_logprobs": top,
        "text_offset": [start + token.offset for token in tokens],
    }


def _entry(token: int, logprob: float, text: Text) -> dict[str, Any]:
    return {"token": _word(token, text), "logprob": logprob, "bytes": list(text.spelling(token))}


def _word(token: int, text: Text) -> str:
    return text.spelling(token).decode(errors="replace")
